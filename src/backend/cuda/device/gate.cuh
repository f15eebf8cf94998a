// The gated activations' one formula.
#pragma once

namespace octet::cuda {

// Both activations are x · sigmoid(u): u = x for SiLU, u = 2 √(2/π) (x + 0.044715 x³) for GELU.
inline constexpr float kGeluScale = 1.59576912f;
inline constexpr float kGeluCubic = 0.044715f;

__device__ inline float gate_argument(float x, bool gelu) {
  return gelu ? kGeluScale * (x + x * x * x * kGeluCubic) : x;
}
// The reciprocal is the hardware's, within one unit in the last place: a kernel over many rows has no
// time for more.
__device__ inline float active(float x, bool gelu) {
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + expf(-gate_argument(x, gelu))));
  return x * sigmoid;
}

}  // namespace octet::cuda
