// Decoding's arithmetic over E4M3 pages, to the bytes of attention_codes.cuh: a warpgroup takes a
// tile of 64 keys, and keys are the wide operand of the matrix unit. S = K Qᵀ and O = Vᵀ Wᵀ, where
// columns 2r and 2r + 1 of Qᵀ and Wᵀ are the high and the low term of query row r: so a thread
// gets both products of a row, and adds them.
//
// Lane (g = lane / 4, t = lane % 4) of warp w holds of S the keys 16 w + g and 16 w + g + 8, of O
// the head elements 64 m + 16 w + g and + 8, each of the rows 4 i + t.
#pragma once

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/attention_tile.cuh"
#include "backend/cuda/device/mbarrier.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/device/wgmma.cuh"
#include "ops/attention.h"

namespace octet::cuda {

// What is known of a stage's chunk: it has keys [first, end) of its 256, and block b of 16 keys
// only if bit b of `blocks` is set.
struct CodesChunk {
  int first, end;
  uint32_t blocks;
  __device__ bool sees(int key) const {
    return key >= first && key < end && (blocks >> key / 16 & 1u) != 0;
  }
  __device__ bool has(int tile) const {
    return first < (tile + 1) * kTileKeys && end > tile * kTileKeys;
  }
};

template <int kWidth, int kRows>
struct DecodeCodes {
  static constexpr int kColumns = 2 * kRows;
  static constexpr int kTiles = kChunkKeys / kTileKeys;
  static constexpr int kTileBytes = kTileKeys * kWidth;  // of keys, and of values
  static constexpr int kBlockBytes = 16 * kWidth;
  static constexpr int kWeightBytes = kColumns * kTileKeys;

  // Where things lie in a stage, which holds all that a chunk needs.
  static constexpr int kKeys = 0;                      // tiles of 64 rows, swizzled
  static constexpr int kValues = kTiles * kTileBytes;  // tiles of four blocks [kWidth][16]
  static constexpr int kKeyScales = 2 * kValues;
  static constexpr int kValueScales = kKeyScales + kChunkKeys * 4;
  static constexpr int kQueries = kValueScales + kChunkKeys * 4;      // an operand of kWidth bytes
  static constexpr int kSums = kQueries + kColumns * kWidth;          // [tile][warp][row][residue]
  static constexpr int kMaxima = kSums + kTiles * 4 * kRows * 8 * 4;  // [tile][row][warp]
  static constexpr int kTargets = kMaxima + kTiles * kRows * 4 * 4;   // chunk_index or −1
  static constexpr int kFactors = kTargets + kRows * 8;
  static constexpr int kChunk = kFactors + kRows * 4;
  static constexpr int kStageBytes = (kChunk + 16 + 1023) / 1024 * 1024;
  // Once a tile's scores are there, its keys make room for its weights and its result, a float
  // [row][kWidth]; more rows than fit want the values' room too, when the values are done with.
  static constexpr bool kResultInKeys = kRows * kWidth * 4 + kWeightBytes <= kTileBytes;
  static constexpr int kWeights = kResultInKeys ? kRows * kWidth * 4 : 0;
  static_assert(kWeights + kWeightBytes <= kTileBytes);

  // The result of a tile lies in its keys and, where it is larger, in its values.
  __device__ static int result_at(int tile, int row, int element) {
    const int at = (row * kWidth + (element ^ (row & 3) << 3)) * 4;
    return tile * kTileBytes + (at < kTileBytes ? at : kValues - kTileBytes + at);
  }

  // 64 keys as rows of kWidth bytes, swizzled as wide.
  __device__ static uint64_t key_operand(uint32_t address) {
    constexpr uint64_t kSwizzle = uint64_t{kWidth == 128 ? 1 : 2} << 62;
    constexpr uint64_t kStride = uint64_t{8 * kWidth >> 4} << 32;
    return kSwizzle | kStride | uint64_t{1} << 16 | (address & 0x3FFFFu) >> 4;
  }
  // Core matrices of eight rows of 16 bytes, `row_stride` apart over the rows and `step_stride`
  // over the contraction.
  __device__ static uint64_t core_operand(uint32_t address, int row_stride, int step_stride) {
    return uint64_t(row_stride >> 4) << 32 | uint64_t(step_stride >> 4) << 16 |
           (address & 0x3FFFFu) >> 4;
  }
  // Bytes 16 `piece` of column `column` of an operand [kColumns, bytes].
  __device__ static int query_at(int column, int piece) {
    return (column / 8 * (kWidth / 16) + piece) * 128 + column % 8 * 16;
  }
  __device__ static int weight_at(int column, int block) {
    return (block * kColumns + column) * 16;
  }

  // Values that nobody wrote must not meet a weight of zero.
  __device__ static void clear_values(char* values, const CodesChunk& chunk, int tile, int thread) {
    for (int b = 0; b < 4; ++b) {
      const int key = tile * kTileKeys + 16 * b;
      const int seen = (chunk.blocks >> key / 16 & 1u) != 0 ? chunk.end - key : 0;
      if (seen >= 16) continue;
      uint32_t mask[4] = {0, 0, 0, 0};
#pragma unroll
      for (int token = 0; token < 16; ++token) {
        const int place = static_cast<int>(ops::value_place(token));
        if (token < seen) mask[place / 4] |= 0xFFu << 8 * (place % 4);
      }
      for (int row = thread; row < kWidth; row += 128) {
        auto* at = reinterpret_cast<uint4*>(values + b * kBlockBytes + row * 16);
        const uint4 old = *at;
        *at = make_uint4(old.x & mask[0], old.y & mask[1], old.z & mask[2], old.w & mask[3]);
      }
    }
  }

  // The state of a tile by its warpgroup: maximum, sums and result in the stage. `barrier` is the
  // warpgroup's own.
  __device__ static void attend(char* stage, uint32_t address, const CodesChunk& chunk, int tile,
                                int barrier) {
    const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    float c[kColumns / 2];
#pragma unroll
    for (float& value : c) value = 0;
    const uint64_t keys = key_operand(address + kKeys + tile * kTileBytes);
    const uint64_t queries = core_operand(address + kQueries, kWidth * 8, 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 32; ++step) {
      Wgmma<kColumns>::template run<Operands::kE4M3>(c, keys + 2 * step, queries + 16 * step,
                                                     step > 0);
    }
    wgmma_commit();

    const auto* k_scales = reinterpret_cast<const float*>(stage + kKeyScales) + tile * kTileKeys;
    const auto* v_scales = reinterpret_cast<const float*>(stage + kValueScales) + tile * kTileKeys;
    uint32_t largest = 0;  // scales are positive, so that their bits are in their order
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = lane + 32 * h;
      const float scale = v_scales[key];
      if (chunk.sees(tile * kTileKeys + key) && scale <= INFINITY) {
        largest = max(largest, __float_as_uint(scale));
      }
    }
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    const int power = value_power(__uint_as_float(largest));
    const float up = power_of_two(power), down = power_of_two(-power);
    bool seen[2];
    float k_scale[2], v_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = 16 * warp + g + 8 * h;
      seen[h] = chunk.sees(tile * kTileKeys + key);
      k_scale[h] = k_scales[key];
      v_scale[h] = seen[h] ? v_scales[key] * down : 0.0f;
    }
    const bool whole =
        (chunk.blocks >> 4 * tile & 15u) == 15u && chunk.end >= (tile + 1) * kTileKeys;
    if (!whole) clear_values(stage + kValues + tile * kTileBytes, chunk, tile, thread);

    wgmma_wait<0>();
    wgmma_hold(c);
    auto* const maxima = reinterpret_cast<float*>(stage + kMaxima) + tile * kRows * 4;
    float s[kRows / 4][2];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float score = (c[4 * i + 2 * h] + c[4 * i + 2 * h + 1]) * k_scale[h];
        s[i][h] = seen[h] ? score : -INFINITY;
      }
      float maximum = fmaxf(s[i][0], s[i][1]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, offset));
      }
      if (g == 0) maxima[(4 * i + t) * 4 + warp] = maximum;
    }
    warpgroup_sync(barrier);

    // The weights' terms: a lane with even g puts the high ones of its keys and those of lane ^ 4
    // side by side, one with odd g the low ones.
    const bool odd = (g & 1) != 0;
    auto* const sums =
        reinterpret_cast<float*>(stage + kSums) + (tile * 4 + warp) * kRows * 8 + t * 8 + g;
    char* const weights = stage + kKeys + tile * kTileBytes + kWeights +
                          weight_at(2 * t + (odd ? 1 : 0), warp) + g / 2 * 4;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const float factor = reinterpret_cast<const float*>(stage + kFactors)[4 * i + t];
      const float shift = -tile_maximum(stage, tile, 4 * i + t, factor);
      float p[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[h] = seen[h] ? exp2_fast(fmaf(s[i][h], factor, shift)) : 0.0f;
      }
      sums[32 * i] = p[0] + p[1];
      const TermPairs terms = e4m3_terms(p[0] * v_scale[0], p[1] * v_scale[1]);
      const uint32_t own = odd ? terms.low : terms.high;
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? terms.high : terms.low, 4);
      *reinterpret_cast<uint32_t*>(weights + 128 * i) =
          __byte_perm(own, other, odd ? 0x1504 : 0x5140);
    }
    fence_async_proxy();
    warpgroup_sync(barrier);

    const uint64_t values = core_operand(address + kValues + tile * kTileBytes, 128, kBlockBytes);
    const uint64_t weight_operand =
        core_operand(address + kKeys + tile * kTileBytes + kWeights, 128, kColumns * 16);
    constexpr int kAtOnce = kRows <= 16 ? kWidth / 64 : 1;  // of 64 head elements
    float result[kWidth / 64][kRows / 2];
#pragma unroll
    for (int first = 0; first < kWidth / 64; first += kAtOnce) {
      float o[kAtOnce][kColumns / 2] = {};
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          Wgmma<kColumns>::template run<Operands::kE4M3>(
              o[m], values + 64 * (first + m) + step * (2 * kBlockBytes >> 4),
              weight_operand + step * (2 * kColumns), step > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        wgmma_hold(o[m]);
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          result[first + m][i] = (o[m][2 * i] + o[m][2 * i + 1]) * up;
        }
      }
    }
    if (!kResultInKeys) warpgroup_sync(barrier);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
#pragma unroll
      for (int m = 0; m < kWidth / 64; ++m) {
        const int row = i / 2 * 4 + t, element = 64 * m + 16 * warp + i % 2 * 8 + g;
        *reinterpret_cast<float*>(stage + result_at(tile, row, element)) = result[m][i];
      }
    }
  }

  __device__ static float tile_maximum(const char* stage, int tile, int row, float factor) {
    const float4 m = reinterpret_cast<const float4*>(stage + kMaxima)[tile * kRows + row];
    return fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)) * factor;
  }

  // How a row's tiles fold into its chunk, in order.
  struct RowFolds {
    Fold of[kTiles];
    __device__ RowFolds(const char* stage, const CodesChunk& chunk, int row) {
      const float factor = reinterpret_cast<const float*>(stage + kFactors)[row];
      float maximum = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        of[tile] =
            fold_of(maximum, chunk.has(tile) ? tile_maximum(stage, tile, row, factor) : -INFINITY);
        maximum = of[tile].maximum;
      }
    }
  };

  // Folds the tiles' states into the chunk's, by kThreads threads.
  template <int kThreads>
  __device__ static void fold_tiles(const char* stage, const CodesChunk& chunk, float2* chunk_stats,
                                    float* chunk_values, int thread) {
    const auto* targets = reinterpret_cast<const int64_t*>(stage + kTargets);
    static_assert(kRows * 8 <= kThreads);
    if (thread < kRows * 8) {
      const int row = thread / 8;
      const RowFolds folds(stage, chunk, row);
      const auto* p = reinterpret_cast<const float*>(stage + kSums) + thread;
      float sum = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile, p += 4 * kRows * 8) {
        if (!chunk.has(tile)) continue;
        sum = fold(folds.of[tile], sum,
                   (p[0] + p[kRows * 8]) + (p[2 * kRows * 8] + p[3 * kRows * 8]));
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
      }
      if (thread % 8 == 0 && targets[row] >= 0) {
        chunk_stats[targets[row]] = make_float2(folds.of[kTiles - 1].maximum, sum);
      }
    }
    constexpr int kElements = kRows * kWidth >= 4 * kThreads ? 4 : 1;  // of a thread at once
    for (int i = thread * kElements; i < kRows * kWidth; i += kThreads * kElements) {
      const int row = i / kWidth, element = i % kWidth;
      if (targets[row] < 0) continue;
      const RowFolds folds(stage, chunk, row);
      float out[kElements] = {};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!chunk.has(tile)) continue;
        float values[kElements];
        load_vector(reinterpret_cast<const float*>(stage + result_at(tile, row, element)), values);
#pragma unroll
        for (int e = 0; e < kElements; ++e) out[e] = fold(folds.of[tile], out[e], values[e]);
      }
      store_vector(out, chunk_values + targets[row] * kWidth + element);
    }
  }
};

}  // namespace octet::cuda
