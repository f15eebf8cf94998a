#include "backend/cpu/matrix_checks.h"

#include "base/error.h"

namespace octet::cpu {

using tensor::DType;
using tensor::Granularity;

void check_matrix(std::string_view op, std::string_view what, const tensor::TensorView& x,
                  int64_t rows, int64_t columns) {
  const tensor::Shape expected{rows, columns};
  if ((x.dtype != DType::kF32 && x.dtype != DType::kBF16) || !(x.shape == expected)) {
    fail(op, "{} must be F32 or BF16 {}, but is {} {}", what, expected.to_string(),
         tensor::dtype_name(x.dtype), x.shape.to_string());
  }
}

void check_codes(std::string_view op, std::string_view what, const tensor::QuantizedView& q) {
  if (q.codes.shape.rank() != 2 ||
      (q.codes.dtype != DType::kE4M3 && q.codes.dtype != DType::kE5M2)) {
    fail(op, "the codes of {} must be a matrix of F8_E4M3 or F8_E5M2, but are {} {}", what,
         tensor::dtype_name(q.codes.dtype), q.codes.shape.to_string());
  }
  const tensor::Shape expected = tensor::scale_shape(q.granularity, q.rows(), q.columns());
  if (q.scales.dtype != DType::kF32 || !(q.scales.shape == expected) || !q.scales.contiguous()) {
    fail(op, "the scales of {} (granularity {}) must be contiguous F32 {}, but are {} {}", what,
         tensor::granularity_name(q.granularity), expected.to_string(),
         tensor::dtype_name(q.scales.dtype), q.scales.shape.to_string());
  }
}

int64_t check_weights(std::string_view op, std::span<const ops::Weight> weights, int64_t columns) {
  if (weights.empty()) fail(op, "needs at least one weight, but was given none");
  int64_t rows = 0;
  for (const ops::Weight& weight : weights) {
    if (weight.is_quantized()) {
      check_codes(op, "a weight", weight.quantized);
      if (weight.quantized.granularity == Granularity::kRowBlock) {
        fail(op, "a weight's granularity must be tensor, row or block, but is row_block");
      }
    } else {
      if (weight.dense.shape.rank() != 2) {
        fail(op, "a weight must be a matrix, but is {}", weight.dense.shape.to_string());
      }
      check_matrix(op, "a weight", weight.dense, weight.dense.shape[0], columns);
    }
    if (weight.columns() != columns) {
      fail(op, "a weight must have {} columns, but has {}", columns, weight.columns());
    }
    rows += weight.rows();
  }
  return rows;
}

void check_vector(std::string_view op, std::string_view what, const tensor::TensorView& x,
                  int64_t count, bool bf16_allowed) {
  const bool dtype_fits = x.dtype == DType::kF32 || (bf16_allowed && x.dtype == DType::kBF16);
  const bool contiguous = x.shape.rank() != 0 &&
                          (x.shape.rank() > 1 ? x.contiguous() : x.row_stride == 1 || count <= 1);
  if (!dtype_fits || x.num_elements() != count || !contiguous) {
    fail(op, "{} must be {} contiguous {} values, but is {} {}", what, count,
         bf16_allowed ? "F32 or BF16" : "F32", tensor::dtype_name(x.dtype), x.shape.to_string());
  }
}

void check_gradient_format(std::string_view op, DType format) {
  if (format != DType::kE4M3 && format != DType::kE5M2) {
    fail(op, "gradient_format must be F8_E4M3 or F8_E5M2, but is {}", tensor::dtype_name(format));
  }
}

}  // namespace octet::cpu
