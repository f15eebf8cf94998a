// Eight neighbouring BF16 values as loaded, and their sum of squares in the one order that every
// norm uses.
#pragma once

#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/values.cuh"

namespace octet::cuda {

__device__ inline uint4 load8(const Bf16* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ inline void store8(const uint4& pairs, Bf16* to) {
  *reinterpret_cast<uint4*>(to) = pairs;
}

__device__ inline void unpack8(const uint4& pairs, float (&values)[8]) {
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// Rounds what arithmetic gave: its NaN is the positive one, which both instructions and to_bf16
// make 0x7FFF.
__device__ inline uint4 pack8(const float (&values)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline float add_squares(const uint4& pairs, float sum) {
  float values[8];
  unpack8(pairs, values);
#pragma unroll
  for (const float value : values) sum = fmaf(value, value, sum);
  return sum;
}

__device__ inline float inverse_rms(float sum, float inverse_width, float eps) {
  return rsqrtf(fmaf(sum, inverse_width, eps));
}

// bf16(x × inverse × (weight + offset))
__device__ inline uint4 normed8(const uint4& pairs, const uint4& weight_pairs, float inverse,
                                float weight_offset) {
  float values[8], weights[8];
  unpack8(pairs, values);
  unpack8(weight_pairs, weights);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = values[i] * inverse * (weights[i] + weight_offset);
  return pack8(values);
}

// The sum over kLanes neighbouring lanes, which hold a row of at most 8 × kLanes elements. All
// lanes of the warp must take part.
template <int kLanes>
__device__ inline float lanes_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

}  // namespace octet::cuda
