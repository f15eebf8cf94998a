// What fixes a row's bytes in the attention forward, but for the class of attention_codes.cuh:
// tiles of 64 keys, each by itself (maximum, sums, values), folded in order into chunks of 256, and
// those in order into the row. So any kernel may compute any tile or chunk anywhere.
//
//   score = (q · k × key scale) × factor            q · k: an FP32 chain over the head width
//   m = largest score of the tile; p = 2^(score − m), 0 below 2^−126; sums s_r of the p whose
//   key % 8 = r, in order
//   BF16:  value = an FP32 chain over the tile's keys of bf16(p) × v
//   FP8:   weight = p × value scale; up = the power of two that brings the row's largest one into
//          [1, 2); value = 1 / up × a chain over fp16(weight × up) × v
//   a key that the row does not see has p = 0 and weight 0, whatever its scales, and counts for
//   nothing, whatever its value
//   fold of two states: M = max; old × 2^(M_old − M) + new × 2^(m − M), for value and every s_r
//   a chunk's sum = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
//   the row = bf16(value × (1 / sum))
//
// Keys and BF16 values lie in shared memory as rows of kWidth elements, 16-byte pieces swizzled so
// that the loads below touch every bank once; FP8 values as in their page, blocks of 16 keys, each
// [kWidth][16] bytes, whose words are the matrix unit's operands. The contraction runs over the
// head width in an order that lets a lane load 16 bytes of a key at once; queries are held in the
// same order.
#pragma once

#include <cmath>

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/mma.cuh"
#include "backend/cuda/device/values.cuh"

namespace octet::cuda {

inline constexpr int kTileKeys = 64;
inline constexpr int kChunkKeys = 256;

// One key/value head of one sequence.
struct KeySource {
  const char* k;
  const char* v;
  const float* k_scales;  // E4M3 only
  const float* v_scales;
  const int32_t* pages;
  int64_t page_stride, scale_page_stride;  // elements between pages
  int page_shift, num_pages, max_pages;
  int heads, head, width;  // width ≤ kWidth, the rest is zeros
};

// State of softmax over the tiles of a chunk for the two rows of a lane; maximum in units of log 2.
template <int kWidth>
struct RowState {
  float maximum[2], sum[2][2];  // sum[row][e]: of the keys with key % 8 = 2 (lane % 4) + e
  float out[kWidth / 8][4];     // [n-tile][C register]

  // The chunk's sum over all keys.
  __device__ float total(int h) const { return quad_sum(sum[h][0] + sum[h][1]); }
  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = -INFINITY, sum[h][0] = sum[h][1] = 0;
#pragma unroll
    for (auto& tile : out) {
#pragma unroll
      for (float& value : tile) value = 0;
    }
  }
};

// The weights of what was and of what is added, when two maxima meet; what saw no key weighs 0.
struct Fold {
  float maximum, old_weight, new_weight;
};
__device__ inline Fold fold_of(float old_maximum, float new_maximum) {
  const float less = exp2_fast(-fabsf(old_maximum - new_maximum));  // the other weight is 2^0
  const bool grows = new_maximum > old_maximum, none = new_maximum == -INFINITY;
  return {grows ? new_maximum : old_maximum, grows ? less : 1.0f,
          grows  ? 1.0f
          : none ? 0.0f
                 : less};
}
__device__ inline float fold(const Fold& f, float old_value, float new_value) {
  return fmaf(old_value, f.old_weight, new_value * f.new_weight);
}

// 1 / sum, by which a row's values are multiplied at the end. A row without keys stays zero.
__device__ inline float share_of(float sum) { return sum == 0 ? 0.0f : __frcp_rn(sum); }

template <int kCount>
__device__ inline bool has_nan(const float (&values)[kCount]) {
  bool result = false;
#pragma unroll
  for (const float value : values) result |= isnan(value);
  return result;
}

// BF16 weights of a warp's 16 rows × eight elements of a tile's values, row by row, as if what a
// row does not see were zero: a weight of zero does not hide a value that is no finite number. Row
// h of the lane sees keys [first[h], last[h]]; value(key) has the bits of the lane's element.
// Slow, and needed only where the product for all rows gave a NaN.
template <class Value>
__device__ void multiply_seen(const uint32_t (&weights)[kTileKeys / 16][4], const int (&first)[2],
                              const int (&last)[2], int lane, const Value& value,
                              float (&products)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll 1
    for (int g = 0; g < 8; ++g) {
      const int from = __shfl_sync(0xFFFFFFFFu, first[h], 4 * g);
      const int to = __shfl_sync(0xFFFFFFFFu, last[h], 4 * g);
      const auto seen = [&](int key) { return key >= from && key <= to ? value(key) : 0u; };
      float row[4] = {};
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
        const int key = 16 * step + 2 * (lane % 4);
        mma_16x8x16<false>(row, weights[step], seen(key) | seen(key + 1) << 16,
                           seen(key + 8) | seen(key + 9) << 16);
      }
      if (lane / 4 == g) products[2 * h] = row[2 * h], products[2 * h + 1] = row[2 * h + 1];
    }
  }
}

template <bool kFp8, int kWidth>
struct AttentionTile {
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kRowBytes = kWidth * kElementBytes;
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kScaleBytes = kFp8 ? 2 * kTileKeys * 4 : 0;
  static constexpr int kStageBytes = 2 * kTileBytes + kScaleBytes;  // keys, values, scales
  static constexpr int kSteps = kWidth / 16;                        // of the contraction

  __device__ static int key_piece(int row, int piece) {
    return piece ^ (((row & 1) << 2) & (kPieces - 1));
  }
  __device__ static int value_piece(int row, int piece) {
    return piece ^ ((((row >> 1) & 3) << 1) & (kPieces - 1));
  }

  // Where a key's row begins, for the positions of 32 pages from `first` on: each lane knows one.
  struct PageWindow {
    int64_t row_base, scale_base;  // −1: no such page
    int first;

    __device__ PageWindow(const KeySource& source, int begin, int limit, int lane)
        : row_base(-1), scale_base(-1), first(begin >> source.page_shift) {
      const int table = first + lane;
      if (table >= source.max_pages || table << source.page_shift >= limit) return;
      const int page = source.pages[table];
      if (page < 0 || page >= source.num_pages) return;
      const int64_t row = int64_t{source.head} << source.page_shift;
      row_base = (page * source.page_stride + row * source.width) * kElementBytes;
      scale_base = page * source.scale_page_stride + row;
    }
  };

  // Rows of keys or values [begin, begin + 64) below `limit`, and their scales, by `kWarps` warps;
  // zeros elsewhere, though FP8 values of a block that `limit` cuts need clear_unseen.
  template <bool kKeys, int kWarps>
  __device__ static void load(const KeySource& source, const PageWindow& window, int begin,
                              int limit, uint32_t stage, int warp, int lane) {
    const char* data = kKeys ? source.k : source.v;
    const uint32_t tile = stage + (kKeys ? 0 : kTileBytes);
    const int mask = (1 << source.page_shift) - 1;
    const int row_bytes = source.width * kElementBytes;
#pragma unroll 4
    for (int i = 0; i < kTileKeys * kPieces / (32 * kWarps); ++i) {
      const int index = (i * kWarps + warp) * 32 + lane;
      constexpr bool kBlocks = kFp8 && !kKeys;
      const int row = kBlocks ? index / kWidth * 16 : index / kPieces;
      const int piece = kBlocks ? index % kWidth : index % kPieces;
      const int position = begin + row;
      const int64_t base =
          __shfl_sync(0xFFFFFFFFu, window.row_base, (position >> source.page_shift) - window.first);
      const bool inside = base >= 0 && position < limit &&
                          (kBlocks ? piece < source.width : piece * 16 < row_bytes);
      const char* from = inside ? data + base + (position & mask) * row_bytes + piece * 16 : data;
      const int to = kBlocks ? piece : kKeys ? key_piece(row, piece) : value_piece(row, piece);
      copy_async_16(tile + row * kRowBytes + to * 16, from, inside);
    }
    if constexpr (kFp8) {
      const float* scales = kKeys ? source.k_scales : source.v_scales;
      const uint32_t to = stage + 2 * kTileBytes + (kKeys ? 0 : kTileKeys * 4);
      if (warp < kTileKeys / 32) {
#pragma unroll
        for (int row = warp * 32 + lane; row < kTileKeys; row += 32 * kWarps) {
          const int position = begin + row;
          const int64_t base = __shfl_sync(0xFFFFFFFFu, window.scale_base,
                                           (position >> source.page_shift) - window.first);
          const bool inside = base >= 0 && position < limit;
          copy_async_4(to + row * 4, scales + (inside ? base + (position & mask) : 0), inside);
        }
      }
    }
  }

  // Clears the BF16 values of keys before the first that a row sees, the tile's `first`, and what
  // FP8 values have beyond its first `count` keys in the block that this cuts. After the waiting
  // for `load`, whose threads clear what they copied, and before the barrier.
  template <int kWarps>
  __device__ static void clear_unseen(int first, int count, uint32_t stage, int warp, int lane) {
    if constexpr (!kFp8) {
#pragma unroll 1
      for (int i = 0; (i * kWarps + warp) * 32 < first * kPieces; ++i) {
        const int index = (i * kWarps + warp) * 32 + lane, row = index / kPieces;
        const uint32_t at = stage + kTileBytes + row * kRowBytes;
        if (row < first) store_shared(at + value_piece(row, index % kPieces) * 16, 0, 0, 0, 0);
      }
    } else {
      if (count >= kTileKeys || count % 16 == 0) return;
      const int block = count / 16;
#pragma unroll 1
      for (int i = 0; i < kTileKeys * kPieces / (32 * kWarps); ++i) {
        const int index = (i * kWarps + warp) * 32 + lane;
        if (index / kWidth != block) continue;
        const uint32_t at = stage + kTileBytes + index * 16;
        uint32_t words[4];
        load_shared(at, words);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            const int key = 2 * t + byte / 2 * 8 + byte % 2;
            if (key >= count % 16) words[t] &= ~(0xFFu << 8 * byte);
          }
        }
        store_shared(at, words[0], words[1], words[2], words[3]);
      }
    }
  }

  // Queries of a lane's two rows (null: zeros) in the order of the contraction; with FP8 keys as
  // FP16 under a power of two that `unscale` takes back.
  __device__ static void load_queries(const Bf16* const (&rows)[2], int width, int lane,
                                      uint32_t (&q)[kSteps][4], float (&unscale)[2]) {
    const int t = lane % 4;
    constexpr int kPerLane = kFp8 ? 16 : 8;  // neighbouring elements of a lane
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float amax = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = step / (kPerLane / 4) * (4 * kPerLane) + kPerLane * t +
                        step % (kPerLane / 4) * 4 + 2 * half;
          uint32_t pair = 0;
          if (rows[h] != nullptr && d < width) {
            pair = *reinterpret_cast<const uint32_t*>(rows[h] + d);
          }
          q[step][2 * half + h] = pair;
          amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(pair << 16)),
                                   fabsf(__uint_as_float(pair & 0xFFFF0000u))));
        }
      }
      unscale[h] = 1;
      if constexpr (kFp8) {
        amax = quad_max(amax);
        const int shift = query_shift(amax);
        const float scale = power_of_two(shift);
        unscale[h] = power_of_two(-shift);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& pair = q[step][2 * half + h];
            pair = pack_half(__uint_as_float(pair << 16) * scale,
                             __uint_as_float(pair & 0xFFFF0000u) * scale);
          }
        }
      }
    }
  }

  // What of a tile is between its keys and its values.
  struct Scores {
    // C register e of n-tile j: row e / 2, column 8 j + 2 t + e % 2
    float weights[kTileKeys / 8][4];
    Fold fold[2];
  };

  // Queries times keys, in `scores.weights`.
  __device__ static void multiply_keys(const char* stage, int lane, const uint32_t (&q)[kSteps][4],
                                       Scores& result) {
    const int g = lane / 4, t = lane % 4;
    auto& scores = result.weights;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (float& score : scores[j]) score = 0;
      const int row = 8 * j + g;
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 4) {
        const uint4 words = *reinterpret_cast<const uint4*>(stage + row * kRowBytes +
                                                            key_piece(row, piece + t) * 16);
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        if constexpr (kFp8) {
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            mma_16x8x16<true>(scores[j], q[piece + s], half2_of_e4m3(w[s]),
                              half2_of_e4m3(w[s] >> 16));
          }
        } else {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            mma_16x8x16<false>(scores[j], q[piece / 2 + s], w[2 * s], w[2 * s + 1]);
          }
        }
      }
    }
  }

  // From scores to softmax weights; maximum and sums of `state` move on. Row h of the lane sees the
  // columns [first[h], last[h]] of the tile; `factor` is the softmax scale × log2 e × unscale.
  __device__ static void weigh(const char* stage, int lane, const int (&first)[2],
                               const int (&last)[2], const float (&factor)[2],
                               RowState<kWidth>& state, Scores& result) {
    const int t = lane % 4;
    [[maybe_unused]] const auto* k_scales = reinterpret_cast<const float*>(stage + 2 * kTileBytes);
    auto& scores = result.weights;
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * j + 2 * t + e % 2, h = e / 2;
        float score = scores[j][e];
        if constexpr (kFp8) score *= k_scales[column];
        score *= factor[h];
        if (column < first[h] || column > last[h]) score = -INFINITY;
        scores[j][e] = score;
        largest[h] = fmaxf(largest[h], score);
      }
    }
    float shift[2], sum[2][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = quad_max(largest[h]);
      shift[h] = largest[h] == -INFINITY ? 0.0f : largest[h];
      result.fold[h] = fold_of(state.maximum[h], largest[h]);
      state.maximum[h] = result.fold[h].maximum;
    }
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = exp2_flushing(scores[j][e] - shift[e / 2]);
        sum[e / 2][e % 2] += scores[j][e];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& total = state.sum[i / 2][i % 2];
      total = fold(result.fold[i / 2], total, sum[i / 2][i % 2]);
    }
  }

  // Adds the weighted values to `state`; first and last as for `weigh`. Unless `kRowsDiffer`, BF16
  // values that the rows do not see are zeros.
  template <bool kRowsDiffer>
  __device__ static void add_values(const char* stage, int lane, const int (&first)[2],
                                    const int (&last)[2], Scores& result, RowState<kWidth>& state) {
    const int t = lane % 4;
    auto& scores = result.weights;
    [[maybe_unused]] const float* v_scales =
        reinterpret_cast<const float*>(stage + 2 * kTileBytes) + kTileKeys;
    if constexpr (kFp8) {
      const auto* words = reinterpret_cast<const uint32_t*>(stage + kTileBytes) + lane;
      // Weights × value scales under a power of two of the row's own largest, as FP16.
      float top[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = 8 * j + 2 * t + e % 2;
          const bool sees = column >= first[e / 2] && column <= last[e / 2];
          scores[j][e] = sees ? scores[j][e] * v_scales[column] : 0.0f;
          top[e / 2] = fmaxf(top[e / 2], scores[j][e]);
        }
      }
      float up[2], down[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int power = weight_power(quad_max(top[h]));
        up[h] = power_of_two(-power);
        down[h] = power_of_two(power);
      }
      uint32_t p[kTileKeys / 16][4];
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float* pair = &scores[2 * step + r / 2][2 * (r % 2)];
          p[step][r] = pack_half(pair[0] * up[r % 2], pair[1] * up[r % 2]);
        }
      }
#pragma unroll
      for (int group = 0; group < kWidth / 32; ++group) {
        float tile[4][4] = {};
#pragma unroll
        for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t word = words[step * 4 * kWidth + (4 * group + i) * 32];
            mma_16x8x16<true>(tile[i], p[step], half2_of_e4m3(word), half2_of_e4m3(word >> 16));
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& out = state.out[4 * group + i][e];
            out = fold(result.fold[e / 2], out, tile[i][e] * down[e / 2]);
          }
        }
      }
    } else {
      const char* values = stage + kTileBytes;
      const int g = lane / 4;
      uint32_t p[kTileKeys / 16][4];
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float* pair = &scores[2 * step + r / 2][2 * (r % 2)];
          p[step][r] = pack_bf16(pair[0], pair[1]);
        }
      }
      [[maybe_unused]] const bool cut =
          first[0] > 0 || first[1] > 0 || last[0] < kTileKeys - 1 || last[1] < kTileKeys - 1;
#pragma unroll
      for (int group = 0; group < kWidth / 16; ++group) {
        float tile[2][4] = {};
        // Two elements of a key.
        const auto pair_at = [&](int key) {
          return values + key * kRowBytes + value_piece(key, 2 * group + g / 4) * 16 + g % 4 * 4;
        };
#pragma unroll
        for (int step = 0; step < kTileKeys / 16; ++step) {
          uint32_t b[2][2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const char* at = pair_at(16 * step + 8 * half + 2 * t);  // of the next key too
            const uint32_t w0 = *reinterpret_cast<const uint32_t*>(at);
            const uint32_t w1 = *reinterpret_cast<const uint32_t*>(at + kRowBytes);
            b[0][half] = __byte_perm(w0, w1, 0x5410);
            b[1][half] = __byte_perm(w0, w1, 0x7632);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_16x8x16<false>(tile[i], p[step], b[i][0], b[i][1]);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kRowsDiffer) {
            if (__any_sync(0xFFFFFFFFu, cut && has_nan(tile[i]))) {
              const auto value = [&](int key) -> uint32_t {
                return reinterpret_cast<const uint16_t*>(pair_at(key))[i];
              };
              multiply_seen(p, first, last, lane, value, tile[i]);
            }
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& out = state.out[2 * group + i][e];
            out = fold(result.fold[e / 2], out, tile[i][e]);
          }
        }
      }
    }
  }

  // The element of the head that C register `e` of n-tile `tile` holds.
  __device__ static int element_of(int tile, int e, int lane) {
    const int t = lane % 4;
    return kFp8 ? 8 * tile + 2 * t + e % 2 : tile / 2 * 16 + 4 * t + 2 * (e % 2) + tile % 2;
  }
};

}  // namespace octet::cuda
