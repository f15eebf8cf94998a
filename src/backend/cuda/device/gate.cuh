// The gated activations' one formula.
#pragma once

namespace octet::cuda {

// Both activations are x · sigmoid(u): u = x for SiLU, u = 2 √(2/π) (x + 0.044715 x³) for GELU.
inline constexpr float kGeluScale = 1.59576912f;
inline constexpr float kGeluCubic = 0.044715f;

__device__ inline float gate_argument(float x, bool gelu) {
  return gelu ? kGeluScale * (x + x * x * x * kGeluCubic) : x;
}
// Exponential and reciprocal are the hardware's, good to some 2^-20: a kernel over many rows has no
// time for more, and the result is rounded to BF16.
__device__ inline float active(float x, bool gelu) {
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + __expf(-gate_argument(x, gelu))));
  return x * sigmoid;
}

}  // namespace octet::cuda
