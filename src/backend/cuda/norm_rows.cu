// The norm of BF16 rows with the residual add before it and the quantiser after it: a row is read
// once and stays in registers.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_quantizer.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/fused.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/quantized_rows.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

struct Rows {
  Bf16* data;
  int64_t stride;
};
Rows rows_of(const TensorView& view) { return {view.as<Bf16>(), view.row_stride}; }

struct NormRows {
  Rows x, branch, sum, y;  // branch and y may be null
  const Bf16* weight;
  int width;
  float inverse_width, eps, weight_offset;
  QuantizedRows quantized;
};

// Σ over a row whose vector v of this thread adds up to sums[v]. The order is a function of the
// width alone: 32 neighbouring vectors add up as the lanes of a warp, then those sums, whoever
// holds them.
template <int kVectors>
__device__ float row_sum(float (&sums)[kVectors]) {
  __shared__ float parts[32 * kVectors];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_warps = static_cast<int>(blockDim.x / 32);
#pragma unroll
  for (float& sum : sums) sum = lanes_sum<32>(sum);
  if (kVectors == 1 && num_warps == 1) return sums[0];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (lane == 0) parts[v * num_warps + warp] = sums[v];
  }
  __syncthreads();
  float sum = 0;
  for (int i = lane; i < kVectors * num_warps; i += 32) sum += parts[i];
  return lanes_sum<32>(sum);
}

// A block takes a row, a thread kVectors times eight elements of it; registers are few enough for
// several rows to a multiprocessor.
template <RowScales kScales, int kVectors>
__global__ void __maxnreg__(32 + 8 * kVectors) norm_rows_kernel(const NormRows args) {
  invite_successor();
  await_predecessor();
  const int64_t row = blockIdx.x;
  const int first = 8 * static_cast<int>(threadIdx.x), step = 8 * static_cast<int>(blockDim.x);
  uint4 values[kVectors], others[kVectors], weights[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    values[v] = others[v] = weights[v] = make_uint4(0, 0, 0, 0);
    if (column >= args.width) continue;
    values[v] = load8(args.x.data + row * args.x.stride + column);
    if (args.branch.data != nullptr) {
      others[v] = load8(args.branch.data + row * args.branch.stride + column);
    }
    weights[v] = load8(args.weight + column);
  }
  float squares[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    if (args.branch.data != nullptr) {
      float a[8], b[8];
      unpack8(values[v], a);
      unpack8(others[v], b);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] += b[i];
      values[v] = pack8(a);
      if (column < args.width) store8(values[v], args.sum.data + row * args.sum.stride + column);
    }
    squares[v] = add_squares(values[v], 0);
  }
  const float inverse = inverse_rms(row_sum(squares), args.inverse_width, args.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    values[v] = normed8(values[v], weights[v], inverse, args.weight_offset);
    if (column >= args.width) {
      values[v] = make_uint4(0, 0, 0, 0);
    } else if (args.y.data != nullptr) {
      store8(values[v], args.y.data + row * args.y.stride + column);
    }
  }
  if constexpr (kScales != RowScales::kNone) {
    quantize_row<false, kScales, false>(values, row, first, args.width, args.quantized);
  }
}

// Many narrow rows, `heads` of them next to each other per step of the first axis: kLanes lanes
// take one each.
template <int kLanes>
__global__ void norm_heads_kernel(Rows x, const Bf16* weight, Rows y, int64_t num_rows, int heads,
                                  int width, float inverse_width, float eps, float weight_offset) {
  await_predecessor();
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8;
  const bool is_inside = row < num_rows && column < width;
  const int64_t at = row / heads, within = row % heads * width + column;
  uint4 values = make_uint4(0, 0, 0, 0), weights = values;
  if (is_inside) {
    values = load8(x.data + at * x.stride + within);
    weights = load8(weight + column);
  }
  const float inverse = inverse_rms(lanes_sum<kLanes>(add_squares(values, 0)), inverse_width, eps);
  if (is_inside) {
    store8(normed8(values, weights, inverse, weight_offset), y.data + at * y.stride + within);
  }
}

template <RowScales kScales>
auto kernel_of(int per_thread) {
  return per_thread == 1   ? norm_rows_kernel<kScales, 1>
         : per_thread == 2 ? norm_rows_kernel<kScales, 2>
                           : norm_rows_kernel<kScales, 4>;
}

bool suits(const TensorView& view, const TensorView& like, int64_t width) {
  return view.shape == like.shape && view.dtype == DType::kBF16 && view.data != nullptr &&
         takes_vectors(view, width, 8);
}
bool is_vector(const TensorView& view, int64_t width) {
  return view.shape == Shape{width} && view.dtype == DType::kBF16 && view.row_stride == 1 &&
         view.data != nullptr && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

}  // namespace

bool fused_rms_norm(Context& context, const ops::RmsNormArgs& args) {
  constexpr int64_t kMaxThreads = 1024, kMaxVectors = 4;
  constexpr unsigned kThreads = 256;
  const TensorView& x = args.x;
  const int rank = x.shape.rank();
  if (rank < 2 || rank > 3) return false;
  const int64_t width = x.shape[rank - 1], num_rows = x.rows(), vectors = width / 8;
  const bool has_branch = !args.branch.empty(), quantizes = !args.quantized.empty();
  if (!suits(x, x, width) || !suits(args.y, x, width) || vectors == 0 ||
      !is_vector(args.weight, width) || num_rows == 0) {
    return false;
  }
  if (rank == 3 && width <= 256 && !has_branch && !quantizes) {
    const int lanes = width <= 64 ? 8 : width <= 128 ? 16 : 32;
    const int64_t heads = x.shape[1], all = num_rows * heads;
    const auto kernel = lanes == 8    ? norm_heads_kernel<8>
                        : lanes == 16 ? norm_heads_kernel<16>
                                      : norm_heads_kernel<32>;
    launch("rms_norm", context,
           {dim3(static_cast<unsigned>(divide_up(all * lanes, kThreads))), kThreads}, kernel,
           rows_of(x), static_cast<const Bf16*>(args.weight.as<Bf16>()), rows_of(args.y), all,
           static_cast<int>(heads), static_cast<int>(width), 1.0f / static_cast<float>(width),
           args.eps, args.weight_offset);
    return true;
  }
  if (rank != 2 || vectors > kMaxThreads * kMaxVectors) return false;
  if (has_branch && !(suits(args.branch, x, width) && suits(args.sum, x, width))) return false;
  if (!takes_quantized(args.quantized, num_rows, width)) return false;
  const bool many = num_rows > context.num_multiprocessors();
  const int per_thread = vectors > 2 * kMaxThreads ? 4 : many || vectors > kMaxThreads ? 2 : 1;
  const auto threads = static_cast<unsigned>(round_up(divide_up(vectors, per_thread), 32));
  const QuantizedRows quantized = quantized_rows(context, args.quantized);
  const auto kernel = quantized.kind == RowScales::kNone ? kernel_of<RowScales::kNone>(per_thread)
                      : quantized.kind == RowScales::kPerRow
                          ? kernel_of<RowScales::kPerRow>(per_thread)
                          : kernel_of<RowScales::kPerBlock>(per_thread);
  const bool writes_y = !quantizes || args.quantized.keep_dense;
  launch("rms_norm", context, {dim3(static_cast<unsigned>(num_rows)), threads}, kernel,
         NormRows{.x = rows_of(x),
                  .branch = has_branch ? rows_of(args.branch) : Rows{},
                  .sum = has_branch ? rows_of(args.sum) : Rows{},
                  .y = writes_y ? rows_of(args.y) : Rows{},
                  .weight = args.weight.as<Bf16>(),
                  .width = static_cast<int>(width),
                  .inverse_width = 1.0f / static_cast<float>(width),
                  .eps = args.eps,
                  .weight_offset = args.weight_offset,
                  .quantized = quantized});
  return true;
}

}  // namespace octet::cuda
