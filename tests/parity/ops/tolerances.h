// How far an op may lie from the float64 reference, by element type of its output. A bound is
// absolute + relative · |reference|; BF16 adds its unit roundoff (2^-8) to what F32
// arithmetic leaves.
#pragma once

#include "tensor/tensor.h"

namespace octet::parity {

struct Tolerance {
  double absolute;
  double relative;
};

enum class Op {
  kElementwise,
  kGatedActivation,
  kRmsNorm,
  kRope,
  kAttention,
  kAttentionBackward,
  kLogProbs,
  kAdamW,
};

// F32 arithmetic: a few units in the last place where nothing is summed, more for sums.
inline Tolerance tolerance(Op op, tensor::DType dtype) {
  Tolerance f32{};
  switch (op) {
    case Op::kElementwise:
      f32 = {1e-7, 1e-6};
      break;
    case Op::kGatedActivation:
      f32 = {1e-6, 2e-6};
      break;
    case Op::kRmsNorm:
      f32 = {1e-6, 2e-6};
      break;
    case Op::kRope:
      f32 = {5e-7, 1e-6};
      break;
    case Op::kAttention:
      f32 = {2e-6, 5e-6};
      break;
    case Op::kAttentionBackward:
      f32 = {1e-5, 1e-5};
      break;
    case Op::kLogProbs:
      f32 = {2e-6, 2e-6};
      break;
    case Op::kAdamW:
      f32 = {1e-8, 2e-6};
      break;
  }
  if (dtype == tensor::DType::kBF16) f32.relative += 0x1p-8;
  return f32;
}

// Central differences in F32 arithmetic: what the step leaves.
inline constexpr Tolerance kFiniteDifference{2e-3, 1e-2};

}  // namespace octet::parity
