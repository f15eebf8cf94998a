// What the op functions share: argument checks and the parallel loop.
#pragma once

#include <algorithm>
#include <functional>
#include <string_view>

#include "backend/cpu/context.h"
#include "base/error.h"
#include "tensor/tensor.h"

namespace octet::cpu {

// `view` has this shape and lies in memory.
inline void require_shape(std::string_view op, std::string_view name,
                          const tensor::TensorView& view, const tensor::Shape& shape) {
  if (!(view.shape == shape)) {
    fail(op, "{} must have shape {}, but has {}", name, shape.to_string(), view.shape.to_string());
  }
  if (view.data == nullptr && shape.num_elements() > 0) fail(op, "{} is missing", name);
}

inline void require_rank(std::string_view op, std::string_view name, const tensor::TensorView& view,
                         int least, int most) {
  if (view.shape.rank() < least || view.shape.rank() > most) {
    fail(op, "{} must have {} to {} axes, but has shape {}", name, least, most,
         view.shape.to_string());
  }
  require_shape(op, name, view, view.shape);
}

inline void require_dtype(std::string_view op, std::string_view name,
                          const tensor::TensorView& view, tensor::DType dtype) {
  if (view.dtype != dtype) {
    fail(op, "{} must be {}, but is {}", name, tensor::dtype_name(dtype),
         tensor::dtype_name(view.dtype));
  }
}

inline void require_float(std::string_view op, std::string_view name,
                          const tensor::TensorView& view) {
  if (view.dtype != tensor::DType::kF32 && view.dtype != tensor::DType::kBF16) {
    fail(op, "{} must be F32 or BF16, but is {}", name, tensor::dtype_name(view.dtype));
  }
}

inline void require_contiguous(std::string_view op, std::string_view name,
                               const tensor::TensorView& view) {
  if (!view.contiguous()) fail(op, "{} must be contiguous", name);
}

// A vector [count] of `dtype`.
inline void require_vector(std::string_view op, std::string_view name,
                           const tensor::TensorView& view, tensor::DType dtype, int64_t count) {
  require_dtype(op, name, view, dtype);
  require_shape(op, name, view, tensor::Shape{count});
}

// Where row `index` of the first axis begins, whatever the element type.
inline void* row_at(const tensor::TensorView& view, int64_t index) {
  return static_cast<char*>(view.data) + index * view.row_stride * tensor::dtype_bytes(view.dtype);
}

// How many of `width` columns one item of a loop over columns takes: whole cache lines, as few
// items as there are threads.
inline int64_t column_slice(const Context& context, int64_t width) {
  const int64_t share = (width + context.pool.num_threads() - 1) / context.pool.num_threads();
  return std::max<int64_t>(16, (share + 15) / 16 * 16);
}

// body(begin, end, thread) over [0, count); `cost` is one item's in elements touched. What costs
// less than a hand-over between threads stays on this one. Allocates nothing.
template <class Body>
void parallel(Context& context, int64_t count, int64_t cost, const Body& body) {
  constexpr int64_t kLeastCost = 1 << 15;
  if (count <= 0) return;
  cost = std::max<int64_t>(1, cost);
  const int64_t num_threads = context.pool.num_threads();
  if (num_threads == 1 || count == 1 || count < kLeastCost / cost) {
    body(0, count, 0);
    return;
  }
  const int64_t grain =
      std::clamp<int64_t>(kLeastCost / 2 / cost, 1, (count + num_threads - 1) / num_threads);
  context.pool.parallel_for(count, grain, std::ref(body));
}

}  // namespace octet::cpu
