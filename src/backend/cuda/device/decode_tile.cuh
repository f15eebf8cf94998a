// Decoding's arithmetic on one tile, by a warp: keys are the wide operand of the matrix units
// (S = K Qᵀ, O = Vᵀ P) and eight query rows the narrow one. The bytes are those of AttentionTile.
#pragma once

#include "backend/cuda/device/decode_walk.cuh"
#include "backend/cuda/device/mma.cuh"

namespace octet::cuda {

using DecodeWalk = Walk<8, Chunks::kAll>;
inline constexpr int kTilePages = kTileKeys / kPageKeys;
inline constexpr int kPanelBytes = kTileKeys * 128;  // a tile's keys, 128 bytes of each

// Row r of a fragment of eight is key_of(r): so eight neighbouring lanes load from all banks.
__device__ constexpr int key_of(int row) {
  return (row & 1) << 2 | (row & 4) >> 1 | (row & 2) >> 1;
}

// Over the lanes that share a column.
__device__ inline float column_max(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  }
  return x;
}
// In the order of the keys' residues: lane bits 3, 4, 2 are residue bits 0, 1, 2.
__device__ inline float column_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 16);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 4);
}

// An 8 × 8 matrix of 16-bit values, transposed over the warp.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

template <bool kFp8, int kWidth>
struct Decode {
  static constexpr int kPanels = kWidth * (kFp8 ? 1 : 2) / 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;  // of keys, and of values
  static constexpr int kScaleBytes = kFp8 ? kTileKeys * 4 : 0;
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kMTiles = kWidth / 16;  // of 16 head elements
  // Of a page's head: keys or values, and their scales.
  static constexpr int kPageBytes = kPanels * kPageKeys * 128 + (kFp8 ? kPageKeys * 4 : 0);

  // Registers of a lane (g = lane / 4, t = lane % 4); queries 2t and 2t + 1 are its columns.
  struct State {
    float maximum[2], sum[2];  // sum: of the keys with key % 8 = key_of(g)
    float out[kMTiles][4];     // C registers: element_of(m, e / 2), query 2t + e % 2

    __device__ void clear() {
#pragma unroll
      for (int e = 0; e < 2; ++e) maximum[e] = -INFINITY, sum[e] = 0;
#pragma unroll
      for (auto& tile : out) {
#pragma unroll
        for (float& value : tile) value = 0;
      }
    }
  };

  // M-tiles go in passes of four: FP8 half a 16-byte piece each, of lanes with g & 2 the other half
  // first so that all banks serve; BF16 a panel each.
  static constexpr int kPasses = kMTiles / 4;
  __device__ static int element_of(int m, int half, int g) {
    const int pass = m / 4, within = 2 * (m % 4) + half;
    return kFp8 ? 16 * key_of(g) + 8 * (pass ^ (g >> 1 & 1)) + within
                : 64 * pass + 8 * key_of(g) + within;
  }

  // The row of query head g: B fragments in the order of AttentionTile::load_queries.
  __device__ static float load_query(const Bf16* row, int lane, uint32_t (&q)[kSteps][2]) {
    const int t = lane % 4;
    constexpr int kWords = kFp8 ? 8 : 4;  // of a lane's neighbouring elements, two to a word
    float amax = 0;
#pragma unroll
    for (int group = 0; group < kSteps * 2 / kWords; ++group) {
#pragma unroll
      for (int part = 0; part < kWords / 4; ++part) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (row != nullptr) {
          words =
              *reinterpret_cast<const uint4*>(row + group * 8 * kWords + 2 * kWords * t + 8 * part);
        }
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 4 * part + i;
          q[group * kWords / 2 + word / 2][word % 2] = w[i];
          amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(w[i] << 16)),
                                   fabsf(__uint_as_float(w[i] & 0xFFFF0000u))));
        }
      }
    }
    if constexpr (!kFp8) return 1;
    amax = quad_max(amax);
    const int shift = query_shift(amax);
    const float scale = power_of_two(shift);
#pragma unroll
    for (auto& step : q) {
#pragma unroll
      for (uint32_t& pair : step) {
        pair = pack_half(__uint_as_float(pair << 16) * scale,
                         __uint_as_float(pair & 0xFFFF0000u) * scale);
      }
    }
    return power_of_two(-shift);
  }

  // weights[b][h][e] = q · k × key scale, of key 16 b + 8 h + key_of(g) and query 2t + e.
  __device__ static void multiply_keys(const char* keys, const float* k_scales, int lane,
                                       const uint32_t (&q)[kSteps][2], float (&weights)[4][2][2]) {
    const int row = key_of(lane / 4), t = lane % 4;
    const char* at = keys + row * 128 + ((t ^ row) << 4);
    const int flip = (((4 + t) ^ row) << 4) - ((t ^ row) << 4);  // to the other half of the panel
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int piece = 0; piece < 2 * kPanels; ++piece) {
        const char* from = at + piece / 2 * kPanelBytes + (piece % 2 != 0 ? flip : 0) + b * 2048;
        const uint4 low = *reinterpret_cast<const uint4*>(from);
        const uint4 high = *reinterpret_cast<const uint4*>(from + 1024);
        const uint32_t l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
        if constexpr (kFp8) {
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const uint32_t a[4] = {half2_of_e4m3(l[s]), half2_of_e4m3(h[s]),
                                   half2_of_e4m3(l[s] >> 16), half2_of_e4m3(h[s] >> 16)};
            mma_16x8x16<true>(c, a, q[4 * piece + s][0], q[4 * piece + s][1]);
          }
        } else {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint32_t a[4] = {l[2 * s], h[2 * s], l[2 * s + 1], h[2 * s + 1]};
            mma_16x8x16<false>(c, a, q[2 * piece + s][0], q[2 * piece + s][1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[b][i / 2][i % 2] = kFp8 ? c[i] * k_scales[16 * b + 8 * (i / 2) + row] : c[i];
      }
    }
  }

  // Scores, softmax weights and the fold of maximum and sums, as AttentionTile::weigh.
  __device__ static void weigh(int lane, int first, int last, const float (&factor)[2],
                               State& state, float (&weights)[4][2][2], Fold (&folds)[2]) {
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    if (first > 0 || last < kTileKeys - 1) {  // keys that the sequence does not see
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = 16 * b + 8 * h + key_of(lane / 4);
          if (key >= first && key <= last) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) weights[b][h][e] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weights[b][h][e] *= factor[e];
          largest[e] = fmaxf(largest[e], weights[b][h][e]);
        }
      }
    }
    float shift[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      largest[e] = column_max(largest[e]);
      shift[e] = largest[e] == -INFINITY ? 0.0f : largest[e];
      folds[e] = fold_of(state.maximum[e], largest[e]);
      state.maximum[e] = folds[e].maximum;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weights[b][h][e] = exp2_fast(weights[b][h][e] - shift[e]);
          sum[e] += weights[b][h][e];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) state.sum[e] = fold(folds[e], state.sum[e], sum[e]);
  }

  // Adds the weighted values, as AttentionTile::add_values.
  __device__ static void add_values(const char* values, const float* v_scales, int lane,
                                    float (&weights)[4][2][2], const Fold (&folds)[2],
                                    State& state) {
    const int g = lane / 4, t = lane % 4;
    float down[2] = {1, 1}, up[2] = {1, 1};
    if constexpr (kFp8) {
      float top[2] = {0, 0};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = v_scales[16 * b + 8 * h + key_of(g)];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            weights[b][h][e] *= scale;
            top[e] = fmaxf(top[e], weights[b][h][e]);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int power = weight_power(column_max(top[e]));
        up[e] = power_of_two(-power);
        down[e] = power_of_two(power);
      }
    }
    uint32_t p[4][2];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = weights[b][h][0] * up[0], y = weights[b][h][1] * up[1];
        p[b][h] = transpose_8x8(kFp8 ? pack_half(x, y) : pack_bf16(x, y));
      }
    }
    // Keys t and t + 4 of eight are neighbours in the order of the fragments.
    const char* at = values + t * 128 + ((key_of(g) ^ t) << 4);
    const int flip = 512 + ((key_of(g) ^ (t + 4)) << 4) - ((key_of(g) ^ t) << 4);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const char* from = at + (kFp8 ? (pass ^ (g >> 1 & 1)) * 8 : pass * kPanelBytes);
      float acc[4][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        constexpr int kWords = kFp8 ? 2 : 4;
        uint32_t w[4][kWords];  // of rows t, t + 4, t + 8, t + 12
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* row = from + b * 2048 + i / 2 * 1024 + (i % 2 != 0 ? flip : 0);
          if constexpr (kFp8) {
            const uint2 words = *reinterpret_cast<const uint2*>(row);
            w[i][0] = words.x, w[i][1] = words.y;
          } else {
            const uint4 words = *reinterpret_cast<const uint4*>(row);
            w[i][0] = words.x, w[i][1] = words.y, w[i][2] = words.z, w[i][3] = words.w;
          }
        }
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          if constexpr (kFp8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const unsigned order = half == 0 ? 0x5140 : 0x7362;
              const uint32_t low = __byte_perm(w[0][word], w[1][word], order);
              const uint32_t high = __byte_perm(w[2][word], w[3][word], order);
              const uint32_t a[4] = {half2_of_e4m3(low), half2_of_e4m3(low >> 16),
                                     half2_of_e4m3(high), half2_of_e4m3(high >> 16)};
              mma_16x8x16<true>(acc[2 * word + half], a, p[b][0], p[b][1]);
            }
          } else {
            const uint32_t a[4] = {__byte_perm(w[0][word], w[1][word], 0x5410),
                                   __byte_perm(w[0][word], w[1][word], 0x7632),
                                   __byte_perm(w[2][word], w[3][word], 0x5410),
                                   __byte_perm(w[2][word], w[3][word], 0x7632)};
            mma_16x8x16<false>(acc[word], a, p[b][0], p[b][1]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& out = state.out[4 * pass + m][i];
          const float value = kFp8 ? acc[m][i] * down[i % 2] : acc[m][i];
          out = fold(folds[i % 2], out, value);
        }
      }
    }
  }

  // (maximum, sum) and values of the chunk for the rows that the lane's columns are.
  __device__ static void write(const AttentionProblem& p, const DecodeWalk& walk, int lane,
                               const State& state) {
    const int g = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = column_sum(state.sum[e]);
      const QueryRow row = walk.row(p, 2 * (lane % 4) + e);
      if (row.sequence < 0) continue;
      const int64_t index = chunk_index(p, row.sequence, row.head, walk.chunk);
      if (g == 0) p.chunk_stats[index] = make_float2(state.maximum[e], sum);
      float* to = p.chunk_values + index * kWidth;
#pragma unroll
      for (int m = 0; m < kMTiles; m += 2) {
        *reinterpret_cast<float4*>(to + element_of(m, 0, g)) = make_float4(
            state.out[m][e], state.out[m][2 + e], state.out[m + 1][e], state.out[m + 1][2 + e]);
      }
    }
  }
};

}  // namespace octet::cuda
