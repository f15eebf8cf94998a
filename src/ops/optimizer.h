// Optimiser updates and reductions over parameters.
#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace octet::ops {

// AdamW with decoupled decay, Loshchilov and Hutter, arXiv 1711.05101, in PyTorch's order:
//   w −= lr · weight_decay · w;  m = β1 m + (1−β1) g;  v = β2 v + (1−β2) g²;
//   w −= lr · (m / (1−β1^step)) / (√(v / (1−β2^step)) + eps),   g = gradient_scale · gradient.
// All F32, same number of elements, contiguous. `step` counts from 1.
struct AdamWArgs {
  tensor::TensorView master;
  tensor::TensorView gradient;
  tensor::TensorView first_moment;
  tensor::TensorView second_moment;
  float learning_rate = 0;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0;
  float gradient_scale = 1.0f;
  int64_t step = 1;
};

// Sum of squares in F64 in a fixed order, and how many elements are not finite (left out).
struct SquaredNorm {
  double sum = 0;
  int64_t non_finite = 0;
};

}  // namespace octet::ops
