// Decoding's arithmetic over E4M3 pages, to the bytes of attention_codes.cuh: a warpgroup takes a
// chunk of 256 keys, and keys are the wide operand of the matrix unit (S = K Qᵀ, O = Vᵀ Wᵀ), so
// that a query row costs one column. That operand comes from registers: with so few columns reading
// it is what binds, and so each key and value is read once for the low and the high terms.
//
// Lane (g = lane / 4, t = lane % 4) of warp w holds of S the keys 64 b + 16 w + g + 8 h, of O the
// head elements 64 m + 16 w + g + 8 h, each of the columns 8 j + 2 t + e: accumulators b and m,
// register 4 j + 2 h + e.
#pragma once

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/attention_tile.cuh"
#include "backend/cuda/device/mbarrier.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"
#include "ops/attention.h"

namespace octet::cuda {

// A matrix descriptor, and those of what lies behind.
struct Operand {
  uint32_t low, high;
  __device__ uint64_t at(int bytes) const {
    return uint64_t{high} << 32 | (low + static_cast<uint32_t>(bytes >> 4));
  }
};

// What is known of a stage's chunk: its rows see the keys [first, end) of the 256 whose blocks of
// 16 have their bit in `blocks`; the other blocks are not there.
struct CodesChunk {
  int first, end;
  uint32_t blocks;
  __device__ bool whole() const { return first <= 0 && end == kChunkKeys && blocks == 0xFFFFu; }
  __device__ bool sees(int key) const {
    return key >= first && key < end && (blocks >> (key >> 4) & 1u) != 0;
  }
};

template <int kWidth, int kRows>
struct DecodeCodes {
  static constexpr int kBlocks = kChunkKeys / 16;
  static constexpr int kBlockBytes = 16 * kWidth;     // of keys, and of values
  static constexpr int kQueryBytes = kRows * kWidth;  // of one term
  static constexpr int kWeightBytes = kRows * kChunkKeys;

  // Where things lie in a stage, which holds all that a chunk needs. Once the scores are there, the
  // weights' two terms lie over scales and queries where these are as large; or they, and the sums,
  // over the first keys, whose blocks are then lost.
  static constexpr int kKeys = 0;                        // 256 rows, swizzled
  static constexpr int kValues = kBlocks * kBlockBytes;  // blocks [kWidth][16]
  static constexpr int kKeyScales = 2 * kValues;
  static constexpr int kValueScales = kKeyScales + kChunkKeys * 4;
  static constexpr int kLowQueries = kValueScales + kChunkKeys * 4;
  static constexpr int kHighQueries = kLowQueries + kQueryBytes;
  static constexpr int kMaxima = kHighQueries + kQueryBytes;  // [row][warp]
  static constexpr int kLargest = kMaxima + kRows * 4 * 4;    // value scales, [warp]
  static constexpr int kTargets = kLargest + 16;              // chunk_index or −1
  static constexpr int kFactors = kTargets + kRows * 8;
  static constexpr int kChunk = kFactors + kRows * 4;
  static constexpr bool kKeepsKeys = 2 * kWeightBytes <= kMaxima - kKeyScales;
  static constexpr int kWeights = kKeepsKeys ? kKeyScales : kKeys;
  static constexpr int kSumsBytes = 4 * kRows * 8 * 4;  // [warp][row][key % 8]
  static constexpr int kSums = kKeepsKeys ? kChunk + 16 : kKeys + 2 * kWeightBytes;
  static constexpr int kBytes = kKeepsKeys ? kSums + kSumsBytes : kChunk + 16;
  static constexpr int kStageBytes = (kBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeysLost =
      kKeepsKeys ? 0 : (1u << (kSums + kSumsBytes + kBlockBytes - 1) / kBlockBytes) - 1;
  static_assert(kKeepsKeys || kSums + kSumsBytes <= kValues);

  // The lane's part of 16 rows and two neighbouring pieces of 16 bytes, as the matrix unit takes
  // them from registers: of block `block`'s keys, and of a warp's head elements over the blocks
  // `block` and the next.
  __device__ static void load_keys(uint32_t stage, int block, int piece, int lane,
                                   uint32_t (&to)[4]) {
    const int row = lane % 16, swizzle = kWidth == 128 ? row % 8 : row / 2 % 4;
    load_matrices(
        stage + kKeys + block * kBlockBytes + row * kWidth + (piece + lane / 16 ^ swizzle) * 16,
        to);
  }
  __device__ static void load_values(uint32_t stage, int block, int element, int lane,
                                     uint32_t (&to)[4]) {
    load_matrices(stage + kValues + (block + lane / 16) * kBlockBytes + (element + lane % 16) * 16,
                  to);
  }
  // Core matrices of eight rows of 16 bytes, their distances over rows and over the contraction.
  __device__ static Operand core_operand(uint32_t address, uint32_t over_rows,
                                         uint32_t over_steps) {
    return {over_steps >> 4 << 16 | address >> 4, over_rows >> 4};
  }
  // Where 16 bytes of a row's query, or its weights of a block, lie in their operands.
  __device__ static int query_at(int row, int piece) {
    return (row / 8 * (kWidth / 16) + piece) * 128 + row % 8 * 16;
  }
  __device__ static int weights_at(int row, int block) { return (block * kRows + row) * 16; }

  // Values that nobody wrote must not meet a weight of zero.
  template <int kCount>
  __device__ static void clear_values(char* values, const CodesChunk& chunk, int thread) {
    for (int block = 0; block < kCount; ++block) {
      const int seen = (chunk.blocks >> block & 1u) != 0 ? chunk.end - 16 * block : 0;
      if (seen >= 16) continue;
      uint32_t mask[4];
      first_tokens(seen, mask);
      if (thread < kWidth) {
        auto* at = reinterpret_cast<uint4*>(values + block * kBlockBytes + thread * 16);
        const uint4 old = *at;
        *at = make_uint4(old.x & mask[0], old.y & mask[1], old.z & mask[2], old.w & mask[3]);
      }
    }
  }

  __device__ static float maximum_of(const char* stage, int row, float factor) {
    const float4 m = reinterpret_cast<const float4*>(stage + kMaxima)[row];
    return fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)) * factor;
  }

  // The chunk's state for all rows, to chunk_stats and chunk_values, by a warpgroup whose barrier
  // is `barrier`; no row sees a key behind the first kTiles times 64. `wait_values` waits for the
  // values; `release_keys` runs when the keys are no longer needed, `release` when nothing of the
  // stage is.
  template <int kTiles, class ReleaseKeys, class WaitValues, class Release>
  __device__ static void attend(char* stage, uint32_t stage_address, float2* chunk_stats,
                                float* chunk_values, int barrier, const ReleaseKeys& release_keys,
                                const WaitValues& wait_values, const Release& release) {
    const int thread = warpgroup_thread(), warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    // Known to be one for all lanes, and not ahead of time.
    const uint32_t address = __shfl_sync(0xFFFFFFFFu, stage_address, 0);
    const CodesChunk chunk = *reinterpret_cast<const CodesChunk*>(stage + kChunk);
    float s[kTiles][kRows / 2] = {};
    {
      const Operand queries = core_operand(address + kLowQueries, 8 * kWidth, 128);
      uint32_t keys[2][kWidth / 32][4];  // of two tiles of 64, which are multiplied meanwhile
#pragma unroll
      for (int b = 0; b < kTiles; ++b) {
        auto& tile = keys[b % 2];
        if (b >= 2) wgmma_wait<1>();
#pragma unroll
        for (int within = 0; within < kWidth / 32; ++within) {
          load_keys(address, 4 * b + warp, 2 * within, lane, tile[within]);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kWidth / 16; ++step) {  // the low terms', then the high terms'
          const int within = step % (kWidth / 32), term = step / (kWidth / 32);
          wgmma_codes(s[b], tile[within], queries.at(term * kQueryBytes + 256 * within), step > 0);
        }
        wgmma_commit();
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (auto& scores : s) wgmma_hold(scores);
    if constexpr (kKeepsKeys) release_keys();
    // Scales, of what is seen.
    const auto* k_scales = reinterpret_cast<const float*>(stage + kKeyScales) + 16 * warp + g;
    const auto* v_scales = reinterpret_cast<const float*>(stage + kValueScales) + 16 * warp + g;
    float k_scale[kTiles][2], v_scale[kTiles][2], largest = 0;
    uint32_t seen = 0xFF;  // bit 2 b + h
    if (!chunk.whole()) {
      seen = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (chunk.sees(64 * (i / 2) + 16 * warp + 8 * (i % 2) + g)) seen |= 1u << i;
      }
    }
#pragma unroll
    for (int b = 0; b < kTiles; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        k_scale[b][h] = k_scales[64 * b + 8 * h];
        v_scale[b][h] = (seen >> (2 * b + h) & 1u) != 0 ? v_scales[64 * b + 8 * h] : 0.0f;
        largest = fmaxf(largest, v_scale[b][h]);
      }
    }
    // Scales are positive: their bits are in their order.
    const uint32_t largest_bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
    if (lane == 0) reinterpret_cast<uint32_t*>(stage + kLargest)[warp] = largest_bits;

    auto* const maxima = reinterpret_cast<float*>(stage + kMaxima);
#pragma unroll
    for (int column = 0; column < kRows / 4; ++column) {  // 8 j + 2 t + e
      const int j = column / 2, e = column % 2;
      float maximum = -INFINITY;
#pragma unroll
      for (int b = 0; b < kTiles; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = s[b][4 * j + 2 * h + e];
          score = (seen >> (2 * b + h) & 1u) != 0 ? score * k_scale[b][h] : -INFINITY;
          maximum = fmaxf(maximum, score);
        }
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, offset));
      }
      if (g == 0) maxima[(8 * j + 2 * t + e) * 4 + warp] = maximum;
    }
    warpgroup_sync(barrier);
    const float4 top = *reinterpret_cast<const float4*>(stage + kLargest);
    const int power = value_power(fmaxf(fmaxf(top.x, top.y), fmaxf(top.z, top.w)));
    const float up = power_of_two(power), down = power_of_two(-power);
#pragma unroll
    for (auto& pair : v_scale) pair[0] *= down, pair[1] *= down;

    // The weights' terms: a lane with odd g puts the low ones of its keys and those of lane ^ 4
    // side by side, one with even g the high ones.
    const bool odd = (g & 1) != 0;
    auto* const sums = reinterpret_cast<float*>(stage + kSums) + warp * kRows * 8 + g;
    char* const weights = stage + kWeights + (odd ? 0 : kWeightBytes) + g / 2 * 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float factor[2], shift[2], sum[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * j + 2 * t + e;
        factor[e] = reinterpret_cast<const float*>(stage + kFactors)[row];
        const float maximum = maximum_of(stage, row, factor[e]);
        shift[e] = maximum == -INFINITY ? 0.0f : -maximum;
      }
#pragma unroll
      for (int b = 0; b < kTiles; ++b) {
        uint32_t own = 0, given = 0;  // of both columns
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p0 = exp2_flushing(fmaf(s[b][4 * j + e], factor[e], shift[e]));
          const float p1 = exp2_flushing(fmaf(s[b][4 * j + 2 + e], factor[e], shift[e]));
          sum[e] = b == 0 ? p0 + p1 : sum[e] + (p0 + p1);
          const TermPairs terms = e4m3_terms(p0 * v_scale[b][0], p1 * v_scale[b][1]);
          own |= (odd ? terms.low : terms.high) << 16 * e;
          given |= (odd ? terms.high : terms.low) << 16 * e;
        }
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, given, 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const unsigned order = e == 0 ? (odd ? 0x1504 : 0x5140) : (odd ? 0x3726 : 0x7362);
          *reinterpret_cast<uint32_t*>(weights + weights_at(8 * j + 2 * t + e, 4 * b + warp)) =
              __byte_perm(own, other, order);
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) sums[(8 * j + 2 * t + e) * 8] = sum[e];
    }
    wait_values();
    if (!chunk.whole()) clear_values<4 * kTiles>(stage + kValues, chunk, thread);
    fence_async_proxy();
    warpgroup_sync(barrier);

    constexpr int kHalves = (kTiles + 1) / 2;
    float o[kWidth / 64][kHalves][kRows / 2] = {};  // of the first 128 keys, and of the others
    {
      const Operand weights = core_operand(address + kWeights, 128, kRows * 16);
      uint32_t values[2][4][4];  // of two sums, which go on meanwhile
#pragma unroll
      for (int sum = 0; sum < kWidth / 64 * kHalves; ++sum) {
        const int m = sum / kHalves, half = sum % kHalves;
        if (sum >= 2) wgmma_wait<1>();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          if (step >= 2 * kTiles - 4 * half) break;
          load_values(address, 8 * half + 2 * step, 64 * m + 16 * warp, lane,
                      values[sum % 2][step]);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) {  // of 32 keys: the low terms', then the high terms'
          if (step % 4 >= 2 * kTiles - 4 * half) continue;
          const int block = 8 * half + step % 4 * 2;
          wgmma_codes(o[m][half], values[sum % 2][step % 4],
                      weights.at(step / 4 * kWeightBytes + block * kRows * 16), step > 0);
        }
        wgmma_commit();
      }
    }

    // Meanwhile: the sums over all keys.
    const auto* targets = reinterpret_cast<const int64_t*>(stage + kTargets);
#pragma unroll
    for (int i = thread; i < kRows * 8; i += 128) {
      const int row = i / 8;
      const auto* of = reinterpret_cast<const float*>(stage + kSums) + i;
      float sum = (of[0] + of[kRows * 8]) + (of[2 * kRows * 8] + of[3 * kRows * 8]);
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
      }
      const float factor = reinterpret_cast<const float*>(stage + kFactors)[row];
      const float maximum = maximum_of(stage, row, factor);
      if (i % 8 == 0 && targets[row] >= 0) chunk_stats[targets[row]] = make_float2(maximum, sum);
    }
    float* to[kRows / 4];
#pragma unroll
    for (int column = 0; column < kRows / 4; ++column) {
      const int64_t target = targets[column / 2 * 8 + 2 * t + column % 2];
      to[column] = target < 0 ? nullptr : chunk_values + target * kWidth + 16 * warp + g;
    }
    wgmma_wait<0>();
#pragma unroll
    for (auto& out : o) {
#pragma unroll
      for (auto& part : out) wgmma_hold(part);
    }
    if constexpr (!kKeepsKeys) release_keys();
    release();
#pragma unroll
    for (int column = 0; column < kRows / 4; ++column) {
      if (to[column] == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i) {
        const int at = column / 2 * 4 + i % 2 * 2 + column % 2;
        to[column][32 * i - 24 * (i % 2)] =
            (o[i / 2][0][at] + (kHalves == 2 ? o[i / 2][kHalves - 1][at] : 0)) * up;
      }
    }
  }
};

}  // namespace octet::cuda
