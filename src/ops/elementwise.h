// Embedding, residual add, gated activations. T tokens, H width, I inner width.
#pragma once

#include "ops/quantize.h"
#include "tensor/tensor.h"

namespace octet::ops {

// out[t] = table[ids[t]] × scale, the product in F32, rounded once. table [V, H] BF16|F32, ids [T]
// I32 (checked by the caller; −1: a row of zeros), out [T, H].
struct EmbeddingArgs {
  tensor::TensorView table;
  tensor::TensorView ids;
  tensor::TensorView out;
  float scale = 1.0f;
};

// dtable[ids[t]] += scale × dout[t], dtable [V, H] F32; tokens add up in their order.
struct EmbeddingBackwardArgs {
  tensor::TensorView dout;
  tensor::TensorView ids;
  tensor::TensorView dtable;
  float scale = 1.0f;
};

// out[ids[r]] = rows[r]; the other rows of out stay. rows [R, H] and out [T, H] of one dtype, ids
// [R] I32, all different but −1: nowhere. (Its inverse, a gather, is `embedding` with scale 1.)
struct ScatterRowsArgs {
  tensor::TensorView rows;
  tensor::TensorView ids;
  tensor::TensorView out;
};

// out = a + b in F32, rounded once; all [T, H]; out may be a or b.
struct AddArgs {
  tensor::TensorView a;
  tensor::TensorView b;
  tensor::TensorView out;
};

enum class Activation : uint8_t { kSilu, kGeluTanh };

// out[t, i] = activation(gate[t, i]) × up[t, i]; gate_up [T, 2 I] has gate first; out [T, I].
//   silu(x) = x / (1 + e^-x);  gelu_tanh(x) = x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))
struct GatedActivationArgs {
  tensor::TensorView gate_up;
  tensor::TensorView out;
  Activation activation = Activation::kSilu;
  QuantizedOutput quantized{};
};

// dgate_up [T, 2 I] from dout [T, I] and the forward's gate_up; dgate_up may be gate_up.
struct GatedActivationBackwardArgs {
  tensor::TensorView dout;
  tensor::TensorView gate_up;
  tensor::TensorView dgate_up;
  Activation activation = Activation::kSilu;
};

}  // namespace octet::ops
