// Conversions, gathers and scatters of rows.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int kThreads = 256;

struct Rows {
  FloatArray array;
  int64_t stride;
};
Rows rows_of(const TensorView& view) {
  return {{view.data, view.dtype == DType::kBF16}, view.row_stride};
}

__global__ void convert_kernel(Rows from, Rows to, int64_t columns, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / columns, column = i % columns;
    to.array.set(row * to.stride + column, from.array.get(row * from.stride + column));
  }
}

__global__ void copy_kernel(const uint32_t* from, uint32_t* to, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
}

// A thread takes kCount neighbouring columns; several only where all is BF16.
template <int kCount>
__global__ void embedding_kernel(Rows table, int64_t num_rows, const int32_t* ids, Rows out,
                                 int64_t columns, float scale) {
  await_predecessor();
  const int64_t token = blockIdx.x;
  const int64_t column = kCount * (int64_t{blockIdx.y} * kThreads + threadIdx.x);
  const int32_t id = ids[token];
  if (id < -1 || id >= num_rows || column >= columns) return;
  const int64_t from = id * table.stride + column, to = token * out.stride + column;
  float values[kCount] = {};
  if constexpr (kCount == 1) {
    if (id >= 0) values[0] = table.array.get(from) * scale;
    out.array.set(to, values[0]);
  } else {
    if (id >= 0) load_vector(static_cast<const Bf16*>(table.array.data) + from, values);
#pragma unroll
    for (float& value : values) value *= scale;
    store_vector(values, static_cast<Bf16*>(out.array.data) + to);
  }
}

// One thread per column, so that tokens add up in their order.
__global__ void embedding_backward_kernel(Rows dout, const int32_t* ids, int64_t num_tokens,
                                          float* dtable, int64_t table_stride, int64_t num_rows,
                                          int64_t columns, float scale) {
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  if (column >= columns) return;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t id = ids[t];
    if (id < 0 || id >= num_rows) continue;
    float* sum = dtable + id * table_stride + column;
    *sum += dout.array.get(t * dout.stride + column) * scale;
  }
}

template <class T>
__global__ void scatter_kernel(const T* rows, int64_t rows_stride, const int32_t* ids, T* out,
                               int64_t out_stride, int64_t num_out, int64_t columns) {
  const int32_t id = ids[blockIdx.x];
  if (id < 0 || id >= num_out) return;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    out[id * out_stride + i] = rows[blockIdx.x * rows_stride + i];
  }
}

}  // namespace

void copy_words(Context& context, const void* from, void* to, int64_t count) {
  copy_kernel<<<static_cast<unsigned>(divide_up(count, kThreads)), kThreads, 0, context.stream()>>>(
      static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), count);
  check_launch("copy");
}

void convert(Context& context, const TensorView& from, const TensorView& to) {
  constexpr std::string_view kOp = "convert";
  require_float(kOp, "from", from);
  require_float(kOp, "to", to);
  require_shape(kOp, "to", to, from.shape);
  const int64_t count = from.num_elements();
  if (count == 0) return;
  const bool flat = from.contiguous() && to.contiguous();
  if (flat && from.dtype == to.dtype) {
    check(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.num_bytes()),
                          cudaMemcpyDeviceToDevice, context.stream()),
          kOp);
    return;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(divide_up(count, kThreads), 8192));
  convert_kernel<<<blocks, kThreads, 0, context.stream()>>>(
      rows_of(from), rows_of(to), flat ? count : from.row_elements(), count);
  check_launch(kOp);
}

void embedding(Context& context, const ops::EmbeddingArgs& args) {
  constexpr std::string_view kOp = "embedding";
  require_rank(kOp, "table", args.table, 2, 2);
  require_float(kOp, "table", args.table);
  require_float(kOp, "out", args.out);
  const int64_t num_tokens = args.out.rows(), width = args.table.shape[1];
  require_shape(kOp, "out", args.out, Shape{num_tokens, width});
  require_vector(kOp, "ids", args.ids, DType::kI32, num_tokens);
  if (num_tokens == 0) return;
  const bool vectors = args.table.dtype == DType::kBF16 && args.out.dtype == DType::kBF16 &&
                       takes_vectors(args.table, width, 8) && takes_vectors(args.out, width, 8);
  const dim3 grid(static_cast<unsigned>(num_tokens),
                  static_cast<unsigned>(divide_up(width, vectors ? 8 * kThreads : kThreads)));
  launch(kOp, context, {grid, kThreads}, vectors ? embedding_kernel<8> : embedding_kernel<1>,
         rows_of(args.table), args.table.shape[0],
         static_cast<const int32_t*>(args.ids.as<int32_t>()), rows_of(args.out), width, args.scale);
}

void embedding_backward(Context& context, const ops::EmbeddingBackwardArgs& args) {
  constexpr std::string_view kOp = "embedding_backward";
  require_rank(kOp, "dtable", args.dtable, 2, 2);
  require_dtype(kOp, "dtable", args.dtable, {DType::kF32});
  require_float(kOp, "dout", args.dout);
  const int64_t num_tokens = args.dout.rows(), width = args.dtable.shape[1];
  require_shape(kOp, "dout", args.dout, Shape{num_tokens, width});
  require_vector(kOp, "ids", args.ids, DType::kI32, num_tokens);
  if (num_tokens == 0) return;
  embedding_backward_kernel<<<static_cast<unsigned>(divide_up(width, 32)), 32, 0,
                              context.stream()>>>(
      rows_of(args.dout), args.ids.as<int32_t>(), num_tokens, args.dtable.as<float>(),
      args.dtable.row_stride, args.dtable.shape[0], width, args.scale);
  check_launch(kOp);
}

void scatter_rows(Context& context, const ops::ScatterRowsArgs& args) {
  constexpr std::string_view kOp = "scatter_rows";
  const int64_t num_rows = args.rows.rows(), width = args.out.row_elements();
  require_dtype(kOp, "rows", args.rows, {args.out.dtype});
  if (args.rows.row_elements() != width) {
    fail(kOp, "rows {} and out {} must agree in width", args.rows.shape.to_string(),
         args.out.shape.to_string());
  }
  require_vector(kOp, "ids", args.ids, DType::kI32, num_rows);
  if (num_rows == 0) return;
  const auto launch = [&](auto element) {
    using T = decltype(element);
    scatter_kernel<<<static_cast<unsigned>(num_rows), kThreads, 0, context.stream()>>>(
        args.rows.as<T>(), args.rows.row_stride, args.ids.as<int32_t>(), args.out.as<T>(),
        args.out.row_stride, args.out.rows(), width);
  };
  switch (tensor::dtype_bytes(args.out.dtype)) {
    case 4:
      launch(uint32_t{});
      break;
    case 2:
      launch(uint16_t{});
      break;
    default:
      require_float(kOp, "out", args.out);
  }
  check_launch(kOp);
}

}  // namespace octet::cuda
