// Residual add, gated activations, rotary position embedding. F32 inside, rounded once.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/gate.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using ops::Activation;
using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int kThreads = 256;

// Rows go along y, their elements along x, `vector` to a thread.
dim3 grid_of(int64_t rows, int64_t width, int vector) {
  return dim3(static_cast<unsigned>(divide_up(width, int64_t{kThreads} * vector)),
              static_cast<unsigned>(std::min<int64_t>(rows, 65535)));
}

// Runs body(element, vector) with the element type of `view` and 8 or 1 elements to a thread.
template <class Body>
void with_type(const TensorView& view, bool vectors, const Body& body) {
  using Eight = std::integral_constant<int, 8>;
  using One = std::integral_constant<int, 1>;
  if (view.dtype == DType::kBF16) {
    vectors ? body(Bf16(), Eight()) : body(Bf16(), One());
  } else {
    vectors ? body(0.0f, Eight()) : body(0.0f, One());
  }
}

template <int kVector, class T>
__global__ void add_kernel(const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* out,
                           int64_t out_stride, int64_t rows, int64_t columns) {
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (column >= columns) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float x[kVector], y[kVector];
    load_vector(a + row * a_stride + column, x);
    load_vector(b + row * b_stride + column, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += y[i];
    store_vector(x, out + row * out_stride + column);
  }
}

template <int kVector, class T>
__global__ void gated_kernel(const T* gate_up, int64_t in_stride, T* out, int64_t out_stride,
                             int64_t rows, int64_t width, bool gelu) {
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (column >= width) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* in = gate_up + row * in_stride + column;
    float gate[kVector], up[kVector];
    load_vector(in, gate);
    load_vector(in + width, up);
#pragma unroll
    for (int i = 0; i < kVector; ++i) gate[i] = active(gate[i], gelu) * up[i];
    store_vector(gate, out + row * out_stride + column);
  }
}

// With s = sigmoid(u): d(x s)/dx = s + x s (1 − s) du/dx.
template <int kVector, class T>
__global__ void gated_backward_kernel(const T* dout, int64_t dout_stride, const T* gate_up,
                                      int64_t in_stride, T* dgate_up, int64_t out_stride,
                                      int64_t rows, int64_t width, bool gelu) {
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (column >= width) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* in = gate_up + row * in_stride + column;
    float gate[kVector], up[kVector], dy[kVector];
    load_vector(in, gate);
    load_vector(in + width, up);
    load_vector(dout + row * dout_stride + column, dy);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = gate[i];
      const float s = __fdiv_rn(1.0f, 1.0f + expf(-gate_argument(x, gelu)));
      const float value = x * s;
      float slope = value * (1.0f - s);
      if (gelu) slope *= kGeluScale * (1.0f + x * x * (3 * kGeluCubic));
      gate[i] = dy[i] * up[i] * (s + slope);
      up[i] = dy[i] * value;
    }
    T* to = dgate_up + row * out_stride + column;
    store_vector(gate, to);
    store_vector(up, to + width);
  }
}

template <int kVector, class T>
__global__ void rope_kernel(const T* x, int64_t x_stride, const int32_t* positions,
                            const float* table, int64_t table_stride, int num_positions, T* y,
                            int64_t y_stride, int heads, int half, bool inverse) {
  const int64_t token = blockIdx.x;
  const int position = positions[token];
  if (position < 0 || position >= num_positions) return;
  const float* row = table + position * table_stride;
  const int per_head = half / kVector;
  for (int index = static_cast<int>(threadIdx.x); index < heads * per_head;
       index += static_cast<int>(blockDim.x)) {
    const int head = index / per_head, pair = index % per_head * kVector;
    float cosine[kVector], sine[kVector], low[kVector], high[kVector];
    load_vector(row + pair, cosine);
    load_vector(row + half + pair, sine);
    const int64_t at = int64_t{head} * 2 * half + pair;
    load_vector(x + token * x_stride + at, low);
    load_vector(x + token * x_stride + at + half, high);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float s = inverse ? -sine[i] : sine[i];
      const float first = low[i] * cosine[i] - high[i] * s;
      high[i] = high[i] * cosine[i] + low[i] * s;
      low[i] = first;
    }
    store_vector(low, y + token * y_stride + at);
    store_vector(high, y + token * y_stride + at + half);
  }
}

}  // namespace

void add(Context& context, const ops::AddArgs& args) {
  constexpr std::string_view kOp = "add";
  require_rank(kOp, "out", args.out, 1, 4);
  require_float(kOp, "out", args.out);
  require_like(kOp, "a", args.a, args.out);
  require_like(kOp, "b", args.b, args.out);
  if (args.out.num_elements() == 0) return;
  const int64_t rows = args.out.rows(), width = args.out.row_elements();
  const bool vectors = takes_vectors(args.a, width, 8) && takes_vectors(args.b, width, 8) &&
                       takes_vectors(args.out, width, 8);
  with_type(args.out, vectors, [&](auto element, auto vector) {
    using T = decltype(element);
    constexpr int kVector = decltype(vector)::value;
    add_kernel<kVector><<<grid_of(rows, width, kVector), kThreads, 0, context.stream()>>>(
        args.a.as<T>(), args.a.row_stride, args.b.as<T>(), args.b.row_stride, args.out.as<T>(),
        args.out.row_stride, rows, width);
  });
  check_launch(kOp);
}

void gated_activation(Context& context, const ops::GatedActivationArgs& args) {
  constexpr std::string_view kOp = "gated_activation";
  require_rank(kOp, "out", args.out, 2, 2);
  require_float(kOp, "out", args.out);
  const int64_t rows = args.out.shape[0], width = args.out.shape[1];
  require_shape(kOp, "gate_up", args.gate_up, Shape{args.out.shape[0], 2 * width});
  require_dtype(kOp, "gate_up", args.gate_up, {args.out.dtype});
  if (rows * width == 0) return;
  const bool vectors = takes_vectors(args.gate_up, width, 8) && takes_vectors(args.out, width, 8);
  with_type(args.out, vectors, [&](auto element, auto vector) {
    using T = decltype(element);
    constexpr int kVector = decltype(vector)::value;
    gated_kernel<kVector><<<grid_of(rows, width, kVector), kThreads, 0, context.stream()>>>(
        args.gate_up.as<T>(), args.gate_up.row_stride, args.out.as<T>(), args.out.row_stride, rows,
        width, args.activation == Activation::kGeluTanh);
  });
  check_launch(kOp);
}

void gated_activation_backward(Context& context, const ops::GatedActivationBackwardArgs& args) {
  constexpr std::string_view kOp = "gated_activation_backward";
  require_rank(kOp, "dout", args.dout, 2, 2);
  require_float(kOp, "dout", args.dout);
  const int64_t rows = args.dout.shape[0], width = args.dout.shape[1];
  const Shape pair{args.dout.shape[0], 2 * width};
  require_shape(kOp, "gate_up", args.gate_up, pair);
  require_dtype(kOp, "gate_up", args.gate_up, {args.dout.dtype});
  require_shape(kOp, "dgate_up", args.dgate_up, pair);
  require_dtype(kOp, "dgate_up", args.dgate_up, {args.dout.dtype});
  if (rows * width == 0) return;
  const bool vectors = takes_vectors(args.gate_up, width, 8) &&
                       takes_vectors(args.dout, width, 8) && takes_vectors(args.dgate_up, width, 8);
  with_type(args.dout, vectors, [&](auto element, auto vector) {
    using T = decltype(element);
    constexpr int kVector = decltype(vector)::value;
    gated_backward_kernel<kVector>
        <<<grid_of(rows, width, kVector), kThreads, 0, context.stream()>>>(
            args.dout.as<T>(), args.dout.row_stride, args.gate_up.as<T>(), args.gate_up.row_stride,
            args.dgate_up.as<T>(), args.dgate_up.row_stride, rows, width,
            args.activation == Activation::kGeluTanh);
  });
  check_launch(kOp);
}

void rope(Context& context, const ops::RopeArgs& args) {
  constexpr std::string_view kOp = "rope";
  require_rank(kOp, "x", args.x, 3, 3);
  require_float(kOp, "x", args.x);
  require_like(kOp, "y", args.y, args.x);
  const int64_t num_tokens = args.x.shape[0], width = args.x.shape[2];
  if (width % 2 != 0) fail(kOp, "the head width must be even, but is {}", width);
  require_rank(kOp, "table", args.table, 2, 2);
  require_dtype(kOp, "table", args.table, {DType::kF32});
  require_shape(kOp, "table", args.table, Shape{args.table.shape[0], width});
  require_vector(kOp, "positions", args.positions, DType::kI32, num_tokens);
  if (num_tokens == 0) return;
  const int64_t half = width / 2, heads = args.x.shape[1];
  const bool vectors = takes_vectors(args.x, half, 8) && takes_vectors(args.y, half, 8) &&
                       takes_vectors(args.table, half, 8);
  with_type(args.x, vectors, [&](auto element, auto vector) {
    using T = decltype(element);
    constexpr int kVector = decltype(vector)::value;
    const auto threads = static_cast<unsigned>(
        std::clamp<int64_t>(round_up(heads * half / kVector, 32), 32, kThreads));
    rope_kernel<kVector><<<static_cast<unsigned>(num_tokens), threads, 0, context.stream()>>>(
        args.x.as<T>(), args.x.row_stride, args.positions.as<int32_t>(), args.table.as<float>(),
        args.table.row_stride, static_cast<int>(args.table.shape[0]), args.y.as<T>(),
        args.y.row_stride, static_cast<int>(heads), static_cast<int>(half), args.inverse);
  });
  check_launch(kOp);
}

}  // namespace octet::cuda
