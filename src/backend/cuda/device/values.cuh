// Element types on the device: BF16 and F32 as float, and the encoders of 8-bit floats, byte for
// byte those of tensor/codec.h.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <limits>

namespace octet::cuda {

using Bf16 = __nv_bfloat16;

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

__device__ inline float load(const float* at) { return *at; }
__device__ inline float load(const Bf16* at) { return __bfloat162float(*at); }
// Round to nearest even; NaN keeps its sign and upper bits, as the host's encoder does.
__device__ inline Bf16 to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits >> 16 | 0x40u));
  }
  return __float2bfloat16_rn(value);
}
__device__ inline void store(float value, float* at) { *at = value; }
__device__ inline void store(float value, Bf16* at) { *at = to_bf16(value); }
__device__ inline float round_to_bf16(float value) { return __bfloat162float(to_bf16(value)); }

// An F32 or BF16 array whose type is known at run time.
struct FloatArray {
  void* data;
  bool is_bf16;
  __device__ float get(int64_t at) const {
    return is_bf16 ? load(static_cast<const Bf16*>(data) + at)
                   : static_cast<const float*>(data)[at];
  }
  __device__ void set(int64_t at, float value) const {
    if (is_bf16) {
      store(value, static_cast<Bf16*>(data) + at);
    } else {
      static_cast<float*>(data)[at] = value;
    }
  }
};

// The sign of NaN is kept, as the host's encoder does.
template <bool kE5M2>
__device__ inline uint8_t encode_fp8(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint8_t>(bits >> 24 & 0x80u | 0x7Fu);
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kE5M2 ? __NV_E5M2 : __NV_E4M3);
}
template <bool kE5M2>
__device__ inline float decode_fp8(uint8_t code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(code, kE5M2 ? __NV_E5M2 : __NV_E4M3);
  return __half2float(__half(half));
}

// The scale of a group whose largest finite magnitude is `amax` (ops/quantize.h).
template <bool kE5M2>
__device__ inline float scale_of(float amax, bool pow2) {
  if (amax == 0.0f) return 1.0f;
  const float scale = fmaxf(__fdiv_rn(amax, kE5M2 ? 57344.0f : 448.0f), 0x1p-100f);
  if (!pow2) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u);
}

__device__ inline float finite_magnitude(float value) {
  const float magnitude = fabsf(value);
  return magnitude <= 3.402823466e38f ? magnitude : 0.0f;
}

}  // namespace octet::cuda
