// Quantising rows of BF16 values that a block, or a cluster of blocks, holds in registers: eight
// neighbouring values to a vector, two to a word. Bytes and counts are those of CodeCounts.
#pragma once

#include "backend/cuda/context.h"
#include "backend/cuda/device/cluster.cuh"
#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/values.cuh"

namespace octet::cuda {

enum class RowScales { kNone, kPerRow, kPerBlock };  // kPerBlock: per row and 128 columns

// Where codes [R, C] and their scales go.
struct QuantizedRows {
  uint8_t* codes;  // 8-byte aligned rows
  int64_t stride;  // of codes
  float* scales;   // [R] or [R, ⌈C/128⌉]
  RowScales kind = RowScales::kNone;
  bool pow2;
  int64_t elements;  // R × C
  DeviceCounters* counters;
};

// Magnitudes of BF16 as integers are in the order of the values; from here on they are not finite.
inline constexpr uint32_t kBf16Infinity = 0x7F80;

// Largest magnitude of eight values, as bits, the two halves of the word apart.
__device__ inline uint32_t largest_of(const uint4& pairs) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFF;
  return __vmaxu2(__vmaxu2(pairs.x & kMagnitudes, pairs.y & kMagnitudes),
                  __vmaxu2(pairs.z & kMagnitudes, pairs.w & kMagnitudes));
}
__device__ inline uint32_t join_halves(uint32_t pair) { return max(pair & 0xFFFF, pair >> 16); }

// The same over the finite ones alone. Out of line, since it is rare.
__device__ __noinline__ inline uint32_t largest_finite_of(uint4 pairs) {
  uint32_t largest = 0;
  for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w}) {
    for (const uint32_t magnitude : {pair & 0x7FFF, pair >> 16 & 0x7FFF}) {
      if (magnitude < kBf16Infinity) largest = max(largest, magnitude);
    }
  }
  return largest;
}

// The codes of four values, signs left out, by the general division. Out of line, since it is rare.
template <bool kE5M2>
__device__ __noinline__ uint32_t magnitudes_carefully(uint32_t a, uint32_t b, float scale) {
  uint32_t codes = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = (i < 2 ? a : b) >> 16 * (i % 2) & 0x7FFF;
    const float magnitude = __uint_as_float(bits << 16);
    codes |= uint32_t{encode_fp8<kE5M2>(__fdiv_rn(magnitude, scale))} << 8 * i;
  }
  return codes & 0x7F7F7F7F;
}

// Encodes with one scale and counts. x / scale is rounded as IEEE division does: with the rounded
// reciprocal r, q = x r corrected once by its remainder is that quotient for every significand of
// eight bits and every divisor (checked for all 2^30 pairs). Infinities and tiny scales make it NaN
// and then take the general division.
template <bool kE5M2>
class RowEncoder {
 public:
  __device__ void set_scale(float scale) {
    scale_ = scale;
    reciprocal_ = scale < 0x1p-60f ? __int_as_float(0x7FC00000) : __fdiv_rn(1.0f, scale);
  }

  __device__ uint2 encode(const uint4& pairs) {
    return make_uint2(encode4(pairs.x, pairs.y), encode4(pairs.z, pairs.w));
  }

  // This thread's counts but NaN: underflowed × 2^16 + saturated.
  __device__ unsigned counts() const { return underflowed_ << 16 | saturated_ / 128; }
  __device__ unsigned not_a_number() const { return not_a_number_; }

 private:
  static constexpr uint32_t kLargest = kE5M2 ? 0x7B : 0x7E;
  static constexpr uint32_t kOnes = 0x01010101, kHigh = 0x80808080;

  __device__ float divide(uint32_t bits) const {
    const float x = __uint_as_float(bits), q = x * reciprocal_;
    return fmaf(fmaf(-q, scale_, x), reciprocal_, q);
  }
  __device__ static uint32_t codes_of(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE,
                                    kE5M2 ? __NV_E5M2 : __NV_E4M3);
  }
  __device__ uint32_t encode4(uint32_t a, uint32_t b) {
    const uint32_t quotients = codes_of(divide(a << 16), divide(a & 0xFFFF0000)) |
                               codes_of(divide(b << 16), divide(b & 0xFFFF0000)) << 16;
    uint32_t magnitudes = quotients & ~kHigh;
    if (((magnitudes + kOnes) | (kHigh - magnitudes)) & kHigh) {  // a NaN or a zero
      if ((magnitudes + kOnes) & kHigh) {
        magnitudes = magnitudes_carefully<kE5M2>(a, b, scale_);
        const unsigned count = __popc((magnitudes + kOnes) & kHigh);
        not_a_number_ += count;
        saturated_ -= 128 * count;  // NaN is not, though it counts below
      }
      underflowed_ += __popc((kHigh - magnitudes) & kHigh) - count_zeros(a) - count_zeros(b);
    }
    // The high bit of each byte that is at least the largest, added up 128 each.
    saturated_ = __dp4a((magnitudes + kOnes * (0x80 - kLargest)) & kHigh, kOnes, saturated_);
    return magnitudes | (__byte_perm(a, b, 0x7531) & kHigh);  // every code has its value's sign
  }
  __device__ static unsigned count_zeros(uint32_t pair) {
    return __popc((0x80008000 - (pair & 0x7FFF7FFF)) & 0x80008000);
  }

  float scale_, reciprocal_;
  unsigned saturated_ = 0, underflowed_ = 0, not_a_number_ = 0;
};

// The largest over the block's threads, as bits. Twice in a row needs a barrier in between.
__device__ inline uint32_t block_largest(uint32_t bits) {
  __shared__ uint32_t parts[32];
  bits = __reduce_max_sync(kAllLanes, bits);
  if (blockDim.x == 32) return bits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) parts[warp] = bits;
  __syncthreads();
  return __reduce_max_sync(kAllLanes, lane < static_cast<int>(blockDim.x / 32) ? parts[lane] : 0);
}

// One atomic addition for each kind that occurred: of a warp, or, of kinds that most warps have, of
// the block, all of whose threads must call.
template <bool kE5M2, bool kOfWarps = false>
__device__ void add_counts(const RowEncoder<kE5M2>& encoder, DeviceCounters* counters) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned counts = __reduce_add_sync(kAllLanes, encoder.counts());
  if (encoder.not_a_number() > 0) {
    atomicAdd(&counters->not_a_number, static_cast<unsigned long long>(encoder.not_a_number()));
  }
  if (!kOfWarps && blockDim.x > 32) {
    __shared__ unsigned parts[32];
    if (lane == 0) parts[warp] = counts;
    __syncthreads();
    if (warp > 0) return;
    counts =
        __reduce_add_sync(kAllLanes, lane < static_cast<int>(blockDim.x / 32) ? parts[lane] : 0);
  }
  if (lane != 0) return;
  if (counts % 65536 > 0) {
    atomicAdd(&counters->saturated, static_cast<unsigned long long>(counts % 65536));
  }
  if (counts >= 65536) {
    atomicAdd(&counters->underflowed, static_cast<unsigned long long>(counts / 65536));
  }
}

// Quantises one row of `width` values (a multiple of 8, at most 65,535 to a block). With
// kClusters the blocks of a cluster may hold neighbouring parts of it. This thread's vector v
// starts at column `first` + v × 8 × blockDim.x, a multiple of 128 for lanes 0 and 16; what lies
// outside the row must be zero. All threads must call.
template <bool kE5M2, RowScales kScales, bool kClusters, int kVectors>
__device__ void quantize_row(const uint4 (&pairs)[kVectors], int64_t row, int first, int width,
                             const QuantizedRows& to) {
  const int step = 8 * static_cast<int>(blockDim.x);
  uint8_t* codes = to.codes + row * to.stride;
  RowEncoder<kE5M2> encoder;
  if constexpr (kScales == RowScales::kPerRow) {
    uint32_t bits = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) bits = __vmaxu2(bits, largest_of(pairs[v]));
    bits = block_largest(join_halves(bits));
    if constexpr (kClusters) bits = cluster_largest(bits);
    if (bits >= kBf16Infinity) {
      bits = 0;
      for (int v = 0; v < kVectors; ++v) bits = max(bits, largest_finite_of(pairs[v]));
      __syncthreads();
      bits = block_largest(bits);
      if constexpr (kClusters) {
        cluster_leave();
        bits = cluster_largest(bits);
      }
    }
    const float scale = scale_of<kE5M2>(__uint_as_float(bits << 16), to.pow2);
    if (first == 0) to.scales[row] = scale;
    encoder.set_scale(scale);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if constexpr (kScales == RowScales::kPerBlock) {  // 16 lanes share a scale
      uint32_t bits = join_halves(largest_of(pairs[v]));
      if (__any_sync(kAllLanes, bits >= kBf16Infinity)) bits = largest_finite_of(pairs[v]);
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
      }
      const float scale = scale_of<kE5M2>(__uint_as_float(bits << 16), to.pow2);
      if (threadIdx.x % 16 == 0 && column < width) {
        to.scales[row * ((width + 127) / 128) + column / 128] = scale;
      }
      encoder.set_scale(scale);
    }
    if (column < width) *reinterpret_cast<uint2*>(codes + column) = encoder.encode(pairs[v]);
  }
  add_counts<kE5M2, kScales == RowScales::kPerRow>(encoder, to.counters);
  if (row == 0 && first == 0) {
    atomicAdd(&to.counters->elements, static_cast<unsigned long long>(to.elements));
  }
  if constexpr (kClusters && kScales == RowScales::kPerRow) cluster_leave();
}

}  // namespace octet::cuda
