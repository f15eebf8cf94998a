// What quantisation and the linear products ask of their operands; each throws Error naming the op.
#pragma once

#include <span>
#include <string_view>

#include "ops/linear.h"

namespace octet::cpu {

// A matrix [rows, columns] of F32 or BF16.
void check_matrix(std::string_view op, std::string_view what, const tensor::TensorView& x,
                  int64_t rows, int64_t columns);
// Codes with scales, of any granularity.
void check_codes(std::string_view op, std::string_view what, const tensor::QuantizedView& q);
// All weights have `columns` columns; returns how many rows they have together.
int64_t check_weights(std::string_view op, std::span<const ops::Weight> weights, int64_t columns);
// A contiguous vector of `count` F32, or BF16 where `bf16_allowed`.
void check_vector(std::string_view op, std::string_view what, const tensor::TensorView& x,
                  int64_t count, bool bf16_allowed = false);

void check_gradient_format(std::string_view op, tensor::DType format);  // E4M3 or E5M2

}  // namespace octet::cpu
