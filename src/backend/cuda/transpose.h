// Bringing operands into the layout that the product reads: rows along the contraction, 16-byte
// aligned, zeros after the last element of a row.
#pragma once

#include <span>

#include "backend/cuda/context.h"
#include "tensor/tensor.h"

namespace octet::cuda {

// to [R, padded] = from [R, C], elements of 1 or 2 bytes; zeros beyond C.
void pad_rows(Context& context, const tensor::TensorView& from, void* to, int64_t padded);

// to [C, padded] = fromᵀ from column `first` on, elements of 1 or 2 bytes. With `zero_tail` zeros
// follow up to `padded`.
void transpose(Context& context, const tensor::TensorView& from, void* to, int64_t padded,
               int64_t first, bool zero_tail);

// The same of decoded values, rounded to BF16.
void transpose_decoded(Context& context, const tensor::QuantizedView& from, void* to,
                       int64_t padded, int64_t first, bool zero_tail);

// to [C, R] = from [R, C]ᵀ.
void transpose_scales(Context& context, const float* from, int64_t rows, int64_t columns,
                      float* to);

// Groups of at most 128 tokens, at [128 g, …) of `padded` = 128 × groups.
struct TokenGroups {
  const int32_t* first;   // device, [count]
  const int32_t* length;  // device, [count]
  int64_t count;
};
// codes [C, padded] and scales [C, count] of x [T, C], each column of a group with its own scale.
void quantize_transposed(Context& context, const tensor::TensorView& x, const TokenGroups& groups,
                         tensor::DType format, tensor::ScaleFormat scale_format, uint8_t* codes,
                         float* scales);

// y = alpha × sums (+ y), rounded once; sums [R, C] F32 contiguous.
void finish_sums(Context& context, const float* sums, const tensor::TensorView& y, float alpha,
                 bool accumulate);

// sums[c] += Σ_t x[t, c]: sums of 128 tokens, added in order.
void add_column_sums(Context& context, const tensor::TensorView& x, float* sums);

}  // namespace octet::cuda
