// The three matrix products of a linear layer, dense or FP8.
// T tokens, K inputs, N outputs. A *group* is a list of weights that read the same input (q, k, v;
// gate, up): its output columns stand side by side in the order of the list.
#pragma once

#include <span>

#include "tensor/tensor.h"

namespace octet::ops {

// One weight [N, K]: dense BF16/F32, or codes with scales (kTensor, kRow, kBlock).
struct Weight {
  tensor::TensorView dense;
  tensor::QuantizedView quantized;

  bool is_quantized() const { return !quantized.empty(); }
  int64_t rows() const { return is_quantized() ? quantized.rows() : dense.shape[0]; }
  int64_t columns() const { return is_quantized() ? quantized.columns() : dense.shape[1]; }
};

// y[t, n] = alpha · Σ_k x[t, k] w[n, k]  (+ bias[n])  (+ y[t, n] as it was, with `accumulate`)
// FP32 accumulation, one rounding to y's dtype at the end. A row of y depends on no other row and
// not on T. Dense weights take `x`; quantised weights take `xq`, whose granularity is kRow (or
// kTensor) for kTensor and kRow weights and kRowBlock for kBlock weights:
//   kTensor, kRow: (Σ codes · codes) × w_scale × x_scale;
//   kBlock: partial sums per 128 of K, acc = fma(partial, x_scale × w_scale, acc).
// x [T, K] BF16|F32; y [T, ΣN] BF16|F32; bias [ΣN] of y's dtype or F32, or empty.
// With `x_per_weight` x is [T, number of weights × K] and each (dense) weight reads its own K
// columns.
// `settled`: neither of the two ops called just before this one wrote any of the weights, so that
// they may be read while those still run. `x_settled`: and the last one neither wrote x nor reads
// or writes y, so that this may run beside it.
struct LinearArgs {
  tensor::TensorView x;
  tensor::QuantizedView xq;
  std::span<const Weight> weights;
  tensor::TensorView bias;
  tensor::TensorView y;
  float alpha = 1.0f;
  bool accumulate = false;
  bool x_per_weight = false;
  bool settled = false;
  bool x_settled = false;
};

// The products of LinearArgs with `x_per_weight` one by one, each as arguments without.
template <class Body>
void for_each_weight(const LinearArgs& args, const Body& body) {
  int64_t column = 0, row = 0;
  for (const Weight& weight : args.weights) {
    LinearArgs part = args;
    part.x_per_weight = false;
    part.weights = {&weight, 1};
    part.x = args.x.slice_columns(column, weight.columns());
    part.y = args.y.slice_columns(row, weight.rows());
    if (!args.bias.empty()) part.bias = args.bias.slice_rows(row, weight.rows());
    column += weight.columns();
    row += weight.rows();
    body(part);
  }
}

// dx[t, k] = alpha · Σ_n dy[t, n] w[n, k]  (+ dx[t, k] as it was)
// dy [T, ΣN] BF16|F32 over the whole group; one FP32 sum over all of its weights, rounded once.
// With quantised weights dy is quantised inside, per weight, to `gradient_format`:
//   kBlock: per token and 128 columns; kRow: w_scale[n] × dy per token; kTensor: dy per token.
// With `dequantize` the codes are decoded to BF16 and the product is a dense one.
struct LinearInputGradArgs {
  tensor::TensorView dy;
  std::span<const Weight> weights;
  tensor::TensorView dx;
  float alpha = 1.0f;
  bool accumulate = false;
  bool dequantize = false;
  tensor::DType gradient_format = tensor::DType::kE4M3;
  tensor::ScaleFormat scale_format = tensor::ScaleFormat::kF32;
};

// dw[n, k] += alpha · Σ_t dy[t, n] x[t, k], dw [N, K] F32.
// dy [T, N], x [T, K] BF16|F32. With `quantize`, both are quantised along the tokens, in groups of
// at most 128 tokens that never span two sequences (each column of a group has its own scale), x to
// E4M3 and dy to `gradient_format`, from their BF16 values; products of groups add up in F32 in the
// order of tokens. `sequence_offsets` (host, S + 1 entries from 0 to T) bounds the sequences.
// `dbias` [N] F32, or empty: dbias[n] += Σ_t dy[t, n].
struct LinearWeightGradArgs {
  tensor::TensorView dy;
  tensor::TensorView x;
  tensor::TensorView dw;
  tensor::TensorView dbias;
  float alpha = 1.0f;
  std::span<const int32_t> sequence_offsets;
  bool quantize = false;
  tensor::DType gradient_format = tensor::DType::kE4M3;
  tensor::ScaleFormat scale_format = tensor::ScaleFormat::kF32;
};

}  // namespace octet::ops
