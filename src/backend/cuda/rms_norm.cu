// Root-mean-square norm and its gradient: one row in one block or warp, sums in a fixed order.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int64_t kNarrow = 256;  // up to here a row takes one warp

// `heads` rows of `width` next to each other per step of the first axis.
struct RowLayout {
  int64_t num_rows, heads, width;
  __device__ int64_t offset(int64_t row, int64_t stride) const {
    return row / heads * stride + row % heads * width;
  }
};

// A row is read by blockDim.x threads; blockDim.y rows share a block (then blockDim.x is a warp).
__device__ float row_sum(float value) {
  return blockDim.x == 32 ? warp_reduce(value, Sum()) : block_sum(value);
}

template <class T>
__global__ void norm_kernel(const T* x, int64_t x_stride, FloatArray weight, T* y, int64_t y_stride,
                            RowLayout rows, float eps, float weight_offset) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows.num_rows) return;
  const T* from = x + rows.offset(row, x_stride);
  T* to = y + rows.offset(row, y_stride);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
    const float value = load(from + i);
    sum = fmaf(value, value, sum);
  }
  const float inverse = inverse_rms(row_sum(sum), rows.width, eps);
  for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
    store(load(from + i) * inverse * (weight.get(i) + weight_offset), to + i);
  }
}

// dx = weight dy / rms − x (Σ dy weight x) / (n rms³); stats [rows] keeps 1/rms for dweight.
template <class T>
__global__ void norm_backward_kernel(const T* dy, int64_t dy_stride, const T* x, int64_t x_stride,
                                     FloatArray weight, T* dx, int64_t dx_stride, RowLayout rows,
                                     float eps, float weight_offset, bool accumulate) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows.num_rows) return;
  const T* dy_row = dy + rows.offset(row, dy_stride);
  const T* x_row = x + rows.offset(row, x_stride);
  T* dx_row = dx + rows.offset(row, dx_stride);
  float sum = 0, dot = 0;
  for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
    const float value = load(x_row + i);
    sum = fmaf(value, value, sum);
    dot = fmaf(load(dy_row + i) * (weight.get(i) + weight_offset), value, dot);
  }
  const float inverse = inverse_rms(row_sum(sum), rows.width, eps);
  const float mean_dot = __fdiv_rn(row_sum(dot), static_cast<float>(rows.width));
  const float pull = inverse * inverse * inverse * mean_dot;
  for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
    const float scaled = load(dy_row + i) * (weight.get(i) + weight_offset);
    float value = fmaf(-load(x_row + i), pull, scaled * inverse);
    if (accumulate) value = load(dx_row + i) + value;
    store(value, dx_row + i);
  }
}

template <class T>
__global__ void inverse_rms_kernel(const T* x, int64_t x_stride, RowLayout rows, float eps,
                                   float* stats) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows.num_rows) return;
  const T* from = x + rows.offset(row, x_stride);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
    const float value = load(from + i);
    sum = fmaf(value, value, sum);
  }
  const float inverse = inverse_rms(row_sum(sum), rows.width, eps);
  if (threadIdx.x == 0) stats[row] = inverse;
}

// One thread per column: rows add up in their order.
template <class T>
__global__ void weight_gradient_kernel(const T* dy, int64_t dy_stride, const T* x, int64_t x_stride,
                                       RowLayout rows, const float* stats, float* dweight) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= rows.width) return;
  float sum = dweight[column];
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const float normed = load(x + rows.offset(row, x_stride) + column) * stats[row];
    sum = fmaf(load(dy + rows.offset(row, dy_stride) + column), normed, sum);
  }
  dweight[column] = sum;
}

RowLayout check_rows(std::string_view op, const TensorView& x, const TensorView& weight) {
  require_rank(op, "x", x, 2, 3);
  require_float(op, "x", x);
  require_float(op, "weight", weight);
  const int64_t heads = x.shape.rank() == 3 ? x.shape[1] : 1;
  const RowLayout rows{x.shape[0] * heads, heads, x.shape[x.shape.rank() - 1]};
  require_shape(op, "weight", weight, Shape{rows.width});
  return rows;
}

struct Launch {
  dim3 grid, block;
};
Launch launch_of(const RowLayout& rows) {
  const dim3 block = rows.width <= kNarrow ? dim3(32, 8) : dim3(256, 1);
  return {dim3(static_cast<unsigned>(divide_up(rows.num_rows, block.y))), block};
}

}  // namespace

void rms_norm(Context& context, const ops::RmsNormArgs& args) {
  constexpr std::string_view kOp = "rms_norm";
  const RowLayout rows = check_rows(kOp, args.x, args.weight);
  require_like(kOp, "y", args.y, args.x);
  if (rows.num_rows == 0) return;
  const auto [grid, block] = launch_of(rows);
  const FloatArray weight{args.weight.data, args.weight.dtype == DType::kBF16};
  const auto launch = [&](auto element) {
    using T = decltype(element);
    norm_kernel<<<grid, block, 0, context.stream()>>>(args.x.as<T>(), args.x.row_stride, weight,
                                                      args.y.as<T>(), args.y.row_stride, rows,
                                                      args.eps, args.weight_offset);
  };
  args.x.dtype == DType::kBF16 ? launch(Bf16()) : launch(0.0f);
  check_launch(kOp);
}

void rms_norm_backward(Context& context, const ops::RmsNormBackwardArgs& args) {
  constexpr std::string_view kOp = "rms_norm_backward";
  const RowLayout rows = check_rows(kOp, args.x, args.weight);
  require_like(kOp, "dy", args.dy, args.x);
  require_like(kOp, "dx", args.dx, args.x);
  if (!args.dweight.empty()) {
    require_vector(kOp, "dweight", args.dweight, DType::kF32, rows.width);
  }
  if (rows.num_rows == 0) return;
  const auto [grid, block] = launch_of(rows);
  const FloatArray weight{args.weight.data, args.weight.dtype == DType::kBF16};
  const cudaStream_t stream = context.stream();
  const auto launch = [&](auto element) {
    using T = decltype(element);
    if (!args.dweight.empty()) {  // before dx, which may lie where dy or x does
      auto* stats = context.scratch<float>(kScratchSums, rows.num_rows);
      inverse_rms_kernel<<<grid, block, 0, stream>>>(args.x.as<T>(), args.x.row_stride, rows,
                                                     args.eps, stats);
      weight_gradient_kernel<<<static_cast<unsigned>(divide_up(rows.width, 32)), 32, 0, stream>>>(
          args.dy.as<T>(), args.dy.row_stride, args.x.as<T>(), args.x.row_stride, rows, stats,
          args.dweight.as<float>());
    }
    norm_backward_kernel<<<grid, block, 0, stream>>>(
        args.dy.as<T>(), args.dy.row_stride, args.x.as<T>(), args.x.row_stride, weight,
        args.dx.as<T>(), args.dx.row_stride, rows, args.eps, args.weight_offset, args.accumulate);
  };
  args.x.dtype == DType::kBF16 ? launch(Bf16()) : launch(0.0f);
  check_launch(kOp);
}

}  // namespace octet::cuda
