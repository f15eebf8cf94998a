// Decoding's arithmetic on a chunk of E4M3 pages that sequences share, to the bytes of
// attention_codes.cuh: a warpgroup takes 64 query rows, which all see all 256 keys. Queries are the
// wide operand of the matrix unit and the chunk's scores lie in registers, as in prefill.
//
// Lane (g = lane / 4, t = lane % 4) of warp w holds rows 16 w + g + 8 h, h = 0, 1, and columns 8 j
// + 2 t + e, keys of a quarter of the chunk or head elements: register 4 j + 2 h + e.
#pragma once

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/attention_tile.cuh"
#include "backend/cuda/device/mbarrier.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"

namespace octet::cuda {

// What a worker knows of the rows of an item, which all see the chunks [begin, end).
template <int kRows>
struct SharedRows {
  int64_t targets[kRows];  // chunk_index of chunk 0, or −1
  float factors[kRows];    // softmax scale × log2 e × 2^−query_power
  int begin, end;          // end 0: there is no item, and none follows
};

template <int kWidth>
struct SharedCodes {
  static constexpr int kRows = 64;
  static constexpr int kBlocks = kChunkKeys / 16;
  static constexpr int kBlockBytes = 16 * kWidth;
  static constexpr int kSlabBytes = kRows * 128;

  // Shared memory of a block: keys [256][kWidth], rows swizzled as wide as that; values as they lie
  // in their pages, blocks [kWidth][16]; and two places for an item's rows. In each the queries,
  // [64][2 kWidth], the high terms of a row before its low ones, in slabs of 128 columns swizzled
  // by 128.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kChunkKeys * kWidth;
  static constexpr int kQueries = kValues + kChunkKeys * kWidth;
  static constexpr int kQueryBytes = kRows * 2 * kWidth;
  static constexpr int kKeyScales = kQueries + 2 * kQueryBytes;
  static constexpr int kValueScales = kKeyScales + kChunkKeys * 4;
  static constexpr int kItems = kValueScales + kChunkKeys * 4;
  static constexpr int kBytes = kItems + 2 * static_cast<int>(sizeof(SharedRows<kRows>));

  char* shared;
  uint32_t base;
  __device__ SharedRows<kRows>& rows(int place) const {
    return reinterpret_cast<SharedRows<kRows>*>(shared + kItems)[place];
  }
  // From queries as they are, row by row, to their terms, in a place, by all threads, whose barrier
  // is `sync`; `factor`: softmax scale × log2 e.
  __device__ void turn_queries(int place, float factor, int sync) const {
    constexpr int kLanes = kWidth / 8, kAtOnce = 128 / kLanes;  // of a row; rows
    const int thread = warpgroup_thread(), piece = thread % kLanes;
    const auto* from = reinterpret_cast<const uint4*>(shared + kQueries + place * kQueryBytes);
    uint4 words[kRows / kAtOnce];
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      words[i] = make_uint4(0, 0, 0, 0);
      if (rows(place).targets[i * kAtOnce + thread / kLanes] >= 0) {
        words[i] = from[i * 128 + thread];
      }
    }
    warpgroup_sync(sync);
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      place_query(place, i * kAtOnce + thread / kLanes, piece, words[i], factor);
    }
    fence_async_proxy();
    warpgroup_sync(sync);
  }

  // The state of chunk `chunk` for the rows of a place, to chunk_stats and chunk_values.
  // `release_keys` runs when the keys are no longer needed, `wait_values` waits for values and
  // their scales, `release_values` runs when these are no longer needed.
  template <class ReleaseKeys, class WaitValues, class ReleaseValues>
  __device__ void attend(int place, int chunk, float2* chunk_stats, float* chunk_values,
                         const ReleaseKeys& release_keys, const WaitValues& wait_values,
                         const ReleaseValues& release_values) const {
    const int thread = warpgroup_thread(), warp = thread / 32, lane = thread % 32;
    const int queries = kQueries + place * kQueryBytes;
    float s[4][32];  // quarters of the chunk
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      wgmma_hold(s[part]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kWidth / 16; ++step) {  // the low terms', then the high terms'
        const int within = step % (kWidth / 32) * 32, low = step < kWidth / 32 ? kWidth : 0;
        const int at = low + within;
        Wgmma<64>::run<Operands::kE4M3>(
            s[part], descriptor<128>(queries + at / 128 * kSlabBytes + at % 128),
            descriptor<kWidth>(kKeys + part * (64 * kWidth) + within), step > 0);
      }
      wgmma_commit();
    }
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (part % 2 == 0) part == 0 ? wgmma_wait<2>() : wgmma_wait<0>();
      wgmma_hold(s[part]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 scale = columns(kKeyScales, part)[4 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[part][4 * j + i] *= i % 2 == 0 ? scale.x : scale.y;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], s[part][4 * j + i]);
      }
    }
    float row_factor[2], maximum[2], shift[2];
    int64_t target[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + lane / 4 + 8 * h;
      row_factor[h] = rows(place).factors[row];
      target[h] = rows(place).targets[row];
      if (target[h] >= 0) target[h] += chunk;
      maximum[h] = quad_max(largest[h]) * row_factor[h];
      shift[h] = maximum[h] == -INFINITY ? 0.0f : -maximum[h];
    }
    release_keys();
    wait_values();

    float top = 0;
#pragma unroll
    for (int i = 0; i < kChunkKeys / 32; ++i) {
      top = fmaxf(top, reinterpret_cast<const float*>(shared + kValueScales)[32 * i + lane]);
    }
    // Scales are positive: their bits are in their order.
    top = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(top)));
    const int power = value_power(top);
    const float up = power_of_two(power), down = power_of_two(-power);

    uint32_t weights[2][2][4][4];  // half, term (low, high), step of 32 keys
    float sums[4][2][2] = {};      // of 16 keys of each quarter, row, residue
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float(&scores)[32] = s[part];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        scores[i] = exp2_flushing(fmaf(scores[i], row_factor[i % 4 / 2], shift[i % 4 / 2]));
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {  // a key and the eighth after it
        const int at = i / 4 * 8 + i % 4;
        sums[i / 4][i % 4 / 2][i % 2] += scores[at] + scores[at + 4];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 scale = columns(kValueScales, part)[4 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[4 * j + i] *= (i % 2 == 0 ? scale.x : scale.y) * down;
        }
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float* a = &scores[16 * step + 8 * (r / 2) + 2 * (r % 2)];
          const TermPairs first = e4m3_terms(a[0], a[1]), second = e4m3_terms(a[4], a[5]);
          uint32_t(&to)[2][4][4] = weights[part / 2];
          to[0][part % 2 * 2 + step][r] = first.low | second.low << 16;
          to[1][part % 2 * 2 + step][r] = first.high | second.high << 16;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] = (sums[0][h][e] + sums[1][h][e]) + (sums[2][h][e] + sums[3][h][e]);
      }
      const float all = quad_sum(sum[0] + sum[1]);
      if (lane % 4 == 0 && target[h] >= 0) chunk_stats[target[h]] = make_float2(maximum[h], all);
    }
#pragma unroll
    for (int slab = 0; slab < kWidth / 64; ++slab) {
      float values[2][32];  // of the halves of the chunk
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma_hold(values[half]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) {  // of 32 keys: the low terms', then the high terms'
          const int block = 8 * half + step % 4 * 2;
          wgmma_code_values(values[half], weights[half][step / 4][step % 4],
                            descriptor<0>(kValues + block * kBlockBytes + slab * (64 * 16)),
                            step > 0);
        }
        wgmma_commit();
      }
      wgmma_wait<0>();
      wgmma_hold(values[0]);
      wgmma_hold(values[1]);
      if (slab + 1 == kWidth / 64) release_values();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (target[h] < 0) continue;
        auto* to =
            reinterpret_cast<float2*>(chunk_values + target[h] * kWidth + 64 * slab + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = 4 * j + 2 * h;
          to[4 * j] = make_float2((values[0][at] + values[1][at]) * up,
                                  (values[0][at + 1] + values[1][at + 1]) * up);
        }
      }
    }
  }

 private:
  // Eight elements of a row; its other ones are with the lanes beside this one.
  __device__ void place_query(int place, int row, int piece, const uint4& elements,
                              float factor) const {
    const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
    float amax = 0;
#pragma unroll
    for (const uint32_t pair : words) {
      amax = fmaxf(amax, fabsf(__uint_as_float(pair << 16)));
      amax = fmaxf(amax, fabsf(__uint_as_float(pair & 0xFFFF0000u)));
    }
#pragma unroll
    for (int offset = 1; offset < kWidth / 8; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    }
    const int power = query_power(amax);
    const QueryTerms terms = query_terms(words, power_of_two(power));
    store_shared(query_at(place, row, 8 * piece), terms.high[0], terms.high[1]);
    store_shared(query_at(place, row, kWidth + 8 * piece), terms.low[0], terms.low[1]);
    if (piece == 0) {
      rows(place).factors[row] = factor * power_of_two(-power);
    }
  }
  __device__ uint32_t query_at(int place, int row, int column) const {
    return base + kQueries + place * kQueryBytes + column / 128 * kSlabBytes + row * 128 +
           ((column % 128 / 16 ^ row % 8) << 4) + column % 16;
  }

  // The matrix descriptor of an operand from `offset` on.
  template <int kSwizzle>
  __device__ uint64_t descriptor(int offset) const {
    return codes_descriptor<kSwizzle, kBlockBytes>(base, offset);
  }
  // Scales of a quarter of the chunk, from the lane's first columns on; the next ones are four on.
  __device__ const float2* columns(int offset, int part) const {
    return reinterpret_cast<const float2*>(shared + offset) + part * 32 + threadIdx.x % 4;
  }
};

}  // namespace octet::cuda
