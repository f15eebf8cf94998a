// Several neighbouring elements at once, as float.
#pragma once

#include "backend/cuda/device/values.cuh"

namespace octet::cuda {

// kCount elements (1, or 4 or 8 at an address that is a multiple of their size, at most 16 bytes).
template <int kCount>
__device__ inline void load_vector(const Bf16* from, float (&to)[kCount]) {
  if constexpr (kCount == 1) {
    to[0] = load(from);
  } else {
    uint32_t words[kCount / 2];
    if constexpr (kCount == 8) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      words[0] = all.x, words[1] = all.y;
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
}
template <int kCount>
__device__ inline void load_vector(const float* from, float (&to)[kCount]) {
  if constexpr (kCount == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 part = reinterpret_cast<const float4*>(from)[i];
      to[4 * i] = part.x, to[4 * i + 1] = part.y, to[4 * i + 2] = part.z, to[4 * i + 3] = part.w;
    }
  }
}

template <int kCount>
__device__ inline void store_vector(const float (&from)[kCount], Bf16* to) {
  if constexpr (kCount == 1) {
    store(from[0], to);
  } else {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      words[i] = uint32_t{__bfloat16_as_ushort(to_bf16(from[2 * i]))} |
                 uint32_t{__bfloat16_as_ushort(to_bf16(from[2 * i + 1]))} << 16;
    }
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
}
template <int kCount>
__device__ inline void store_vector(const float (&from)[kCount], float* to) {
  if constexpr (kCount == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      reinterpret_cast<float4*>(to)[i] =
          make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
    }
  }
}

}  // namespace octet::cuda
