// What the ops ask of their operands before work is queued; each throws Error naming the op. What
// lies in the operands (ids, slots, page tables) is on the device: kernels leave alone what points
// outside.
#pragma once

#include <initializer_list>
#include <string_view>

#include "base/error.h"
#include "ops/backend.h"

namespace octet::cuda {

inline void require_shape(std::string_view op, std::string_view name,
                          const tensor::TensorView& view, const tensor::Shape& shape) {
  if (!(view.shape == shape)) {
    fail(op, "{} must have shape {}, but has {}", name, shape.to_string(), view.shape.to_string());
  }
  if (view.data == nullptr && shape.num_elements() > 0) fail(op, "{} is missing", name);
}

inline void require_dtype(std::string_view op, std::string_view name,
                          const tensor::TensorView& view,
                          std::initializer_list<tensor::DType> allowed) {
  for (const tensor::DType dtype : allowed) {
    if (view.dtype == dtype) return;
  }
  fail(op, "{} must be {} on CUDA, but is {}", name, tensor::dtype_name(*allowed.begin()),
       tensor::dtype_name(view.dtype));
}

inline void require_float(std::string_view op, std::string_view name,
                          const tensor::TensorView& view) {
  if (view.dtype != tensor::DType::kF32 && view.dtype != tensor::DType::kBF16) {
    fail(op, "{} must be F32 or BF16, but is {}", name, tensor::dtype_name(view.dtype));
  }
}

inline void require_rank(std::string_view op, std::string_view name, const tensor::TensorView& view,
                         int least, int most) {
  if (view.shape.rank() < least || view.shape.rank() > most) {
    fail(op, "{} must have {} to {} axes, but has shape {}", name, least, most,
         view.shape.to_string());
  }
  require_shape(op, name, view, view.shape);
}

inline void require_contiguous(std::string_view op, std::string_view name,
                               const tensor::TensorView& view) {
  if (!view.contiguous()) fail(op, "{} must be contiguous", name);
}

// A contiguous vector [count].
inline void require_vector(std::string_view op, std::string_view name,
                           const tensor::TensorView& view, tensor::DType dtype, int64_t count) {
  require_dtype(op, name, view, {dtype});
  require_shape(op, name, view, tensor::Shape{count});
  if (view.row_stride != 1 && count > 1) fail(op, "{} must be contiguous", name);
}

inline void require_like(std::string_view op, std::string_view name, const tensor::TensorView& view,
                         const tensor::TensorView& x) {
  require_shape(op, name, view, x.shape);
  require_dtype(op, name, view, {x.dtype});
}

inline void require_codes(std::string_view op, std::string_view name,
                          const tensor::QuantizedView& q) {
  require_rank(op, name, q.codes, 2, 2);
  require_dtype(op, name, q.codes, {tensor::DType::kE4M3, tensor::DType::kE5M2});
  require_dtype(op, name, q.scales, {tensor::DType::kF32});
  require_shape(op, name, q.scales, tensor::scale_shape(q.granularity, q.rows(), q.columns()));
  require_contiguous(op, name, q.scales);
}

// Whether rows can be read `count` elements at a time: base, stride and width fit.
inline bool takes_vectors(const tensor::TensorView& view, int64_t width, int64_t count) {
  const int64_t bytes =
      count * tensor::dtype_bytes(view.dtype) < 16 ? count * tensor::dtype_bytes(view.dtype) : 16;
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
         width % count == 0 && view.row_stride % count == 0;
}

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
inline int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

}  // namespace octet::cuda
