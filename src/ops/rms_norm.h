// Root-mean-square norm, Zhang and Sennrich, arXiv 1910.07467.
#pragma once

#include "ops/quantize.h"
#include "tensor/tensor.h"

namespace octet::ops {

// y = bf16(x · rsqrt(mean(x²) + eps) · (weight + weight_offset)), all in F32, rounded once.
// x, y [R, H] or [T, heads, D] (norm over the last axis, one weight for all heads; the first axis
// may be strided), weight [H] or [D] BF16|F32. weight_offset is 1 for Gemma.
// With `branch` (rank 2, like x) the residual add comes first: sum = x + branch, rounded once, and
// the norm is that of sum, which may be x or branch. `quantized` takes y [R, H].
struct RmsNormArgs {
  tensor::TensorView x;
  tensor::TensorView weight;
  tensor::TensorView y;
  float eps = 1e-6f;
  float weight_offset = 0.0f;
  tensor::TensorView branch{};
  tensor::TensorView sum{};
  QuantizedOutput quantized{};
};

// dx (= or +=, with `accumulate`: dx = round(dx + …)) and dweight (+=, F32 [H], rows in their
// order; empty: not wanted) from dy and the forward's x.
struct RmsNormBackwardArgs {
  tensor::TensorView dy;
  tensor::TensorView x;
  tensor::TensorView weight;
  tensor::TensorView dx;
  tensor::TensorView dweight;
  float eps = 1e-6f;
  float weight_offset = 0.0f;
  bool accumulate = false;
};

}  // namespace octet::ops
