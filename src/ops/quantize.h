// Quantisation to 8-bit floats. docs/numerics.md has the contract.
#pragma once

#include "tensor/tensor.h"

namespace octet::ops {

// out = codes and scales of x.
//   scale = max(amax / largest, 2^-100) in F32, amax over the finite values of the group; 1 where
//   all are zero (or none is finite); rounded up to a power of two with ScaleFormat::kPow2.
//   code = encode(x / scale), by IEEE division, saturating; NaN gives 0x7F, ±infinity the largest.
// x [R, C] BF16 or F32; F32 is rounded to BF16 first (one source dtype: equal input, equal bytes).
// With `column_scale` [C] F32 the quantised value is bf16(x) × column_scale in F32, not rounded
// again. out.codes [R, C] E4M3 or E5M2, out.scales as scale_shape(granularity, R, C) says.
struct QuantizeArgs {
  tensor::TensorView x;
  tensor::TensorView column_scale;  // empty: none
  tensor::QuantizedView out;
  tensor::ScaleFormat scale_format = tensor::ScaleFormat::kF32;
};

// out [R, C] BF16 or F32 = code × scale in F32, rounded once to BF16 where out is BF16.
struct DequantizeArgs {
  tensor::QuantizedView x;
  tensor::TensorView out;
};

// How codes were used, added up since the last fetch (per op call, over all elements).
struct QuantizeCounters {
  int64_t elements = 0;
  int64_t saturated = 0;    // |code| is the largest finite one
  int64_t underflowed = 0;  // a non-zero value became code ±0
  int64_t not_a_number = 0;
};

// A quantised copy of an op's BF16|F32 result [R, C], made in the same pass: what `quantize` gives
// for it, its counters included. Empty: none.
struct QuantizedOutput {
  tensor::QuantizedView out{};
  tensor::ScaleFormat scale_format = tensor::ScaleFormat::kF32;
  bool keep_dense = true;  // false: the result itself may be left unwritten

  bool empty() const { return out.empty(); }
};

}  // namespace octet::ops
