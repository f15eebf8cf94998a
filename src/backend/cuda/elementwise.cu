// Residual add, gated activations, rotary position embedding. F32 inside, rounded once.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using ops::Activation;
using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int kThreads = 256;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(count, kThreads), 1, 16384));
}

// Runs `body(float type)` with the element type of `view`.
template <class Body>
void with_type(const TensorView& view, const Body& body) {
  if (view.dtype == DType::kBF16) {
    body(Bf16());
  } else {
    body(0.0f);
  }
}

template <class T>
__global__ void add_kernel(const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* out,
                           int64_t out_stride, int64_t columns, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / columns, column = i % columns;
    store(load(a + row * a_stride + column) + load(b + row * b_stride + column),
          out + row * out_stride + column);
  }
}

// Both activations are x · sigmoid(u): u = x for SiLU, u = 2 √(2/π) (x + 0.044715 x³) for GELU.
constexpr float kGeluScale = 1.59576912f;
constexpr float kGeluCubic = 0.044715f;

__device__ float gate_argument(float x, bool gelu) {
  return gelu ? kGeluScale * (x + x * x * x * kGeluCubic) : x;
}
__device__ float active(float x, bool gelu) {
  return __fdiv_rn(x, 1.0f + expf(-gate_argument(x, gelu)));
}

template <class T>
__global__ void gated_kernel(const T* gate_up, int64_t in_stride, T* out, int64_t out_stride,
                             int64_t width, int64_t count, bool gelu) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / width, column = i % width;
    const T* in = gate_up + row * in_stride + column;
    store(active(load(in), gelu) * load(in + width), out + row * out_stride + column);
  }
}

// With s = sigmoid(u): d(x s)/dx = s + x s (1 − s) du/dx.
template <class T>
__global__ void gated_backward_kernel(const T* dout, int64_t dout_stride, const T* gate_up,
                                      int64_t in_stride, T* dgate_up, int64_t out_stride,
                                      int64_t width, int64_t count, bool gelu) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / width, column = i % width;
    const T* in = gate_up + row * in_stride + column;
    const float x = load(in), up = load(in + width);
    const float dy = load(dout + row * dout_stride + column);
    const float s = __fdiv_rn(1.0f, 1.0f + expf(-gate_argument(x, gelu)));
    const float value = x * s;
    float slope = value * (1.0f - s);
    if (gelu) slope *= kGeluScale * (1.0f + x * x * (3 * kGeluCubic));
    T* to = dgate_up + row * out_stride + column;
    store(dy * up * (s + slope), to);
    store(dy * value, to + width);
  }
}

template <class T>
__global__ void rope_kernel(const T* x, int64_t x_stride, const int32_t* positions,
                            const float* table, int64_t table_stride, int64_t num_positions, T* y,
                            int64_t y_stride, int64_t heads, int64_t half, bool inverse) {
  const int64_t token = blockIdx.x;
  const int32_t position = positions[token];
  if (position < 0 || position >= num_positions) return;
  const float* row = table + position * table_stride;
  for (int64_t i = threadIdx.x; i < heads * half; i += kThreads) {
    const int64_t head = i / half, pair = i % half;
    const float cosine = row[pair];
    const float sine = inverse ? -row[half + pair] : row[half + pair];
    const T* from = x + token * x_stride + head * 2 * half + pair;
    T* to = y + token * y_stride + head * 2 * half + pair;
    const float low = load(from), high = load(from + half);
    store(low * cosine - high * sine, to);
    store(high * cosine + low * sine, to + half);
  }
}

}  // namespace

void add(Context& context, const ops::AddArgs& args) {
  constexpr std::string_view kOp = "add";
  require_rank(kOp, "out", args.out, 1, 4);
  require_float(kOp, "out", args.out);
  require_like(kOp, "a", args.a, args.out);
  require_like(kOp, "b", args.b, args.out);
  const int64_t count = args.out.num_elements();
  if (count == 0) return;
  with_type(args.out, [&](auto element) {
    using T = decltype(element);
    add_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
        args.a.as<T>(), args.a.row_stride, args.b.as<T>(), args.b.row_stride, args.out.as<T>(),
        args.out.row_stride, args.out.row_elements(), count);
  });
  check_launch(kOp);
}

void gated_activation(Context& context, const ops::GatedActivationArgs& args) {
  constexpr std::string_view kOp = "gated_activation";
  require_rank(kOp, "out", args.out, 2, 2);
  require_float(kOp, "out", args.out);
  const int64_t width = args.out.shape[1], count = args.out.num_elements();
  require_shape(kOp, "gate_up", args.gate_up, Shape{args.out.shape[0], 2 * width});
  require_dtype(kOp, "gate_up", args.gate_up, {args.out.dtype});
  if (count == 0) return;
  with_type(args.out, [&](auto element) {
    using T = decltype(element);
    gated_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
        args.gate_up.as<T>(), args.gate_up.row_stride, args.out.as<T>(), args.out.row_stride, width,
        count, args.activation == Activation::kGeluTanh);
  });
  check_launch(kOp);
}

void gated_activation_backward(Context& context, const ops::GatedActivationBackwardArgs& args) {
  constexpr std::string_view kOp = "gated_activation_backward";
  require_rank(kOp, "dout", args.dout, 2, 2);
  require_float(kOp, "dout", args.dout);
  const int64_t width = args.dout.shape[1], count = args.dout.num_elements();
  const Shape pair{args.dout.shape[0], 2 * width};
  require_shape(kOp, "gate_up", args.gate_up, pair);
  require_dtype(kOp, "gate_up", args.gate_up, {args.dout.dtype});
  require_shape(kOp, "dgate_up", args.dgate_up, pair);
  require_dtype(kOp, "dgate_up", args.dgate_up, {args.dout.dtype});
  if (count == 0) return;
  with_type(args.dout, [&](auto element) {
    using T = decltype(element);
    gated_backward_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
        args.dout.as<T>(), args.dout.row_stride, args.gate_up.as<T>(), args.gate_up.row_stride,
        args.dgate_up.as<T>(), args.dgate_up.row_stride, width, count,
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
  with_type(args.x, [&](auto element) {
    using T = decltype(element);
    rope_kernel<<<static_cast<unsigned>(num_tokens), kThreads, 0, context.stream()>>>(
        args.x.as<T>(), args.x.row_stride, args.positions.as<int32_t>(), args.table.as<float>(),
        args.table.row_stride, args.table.shape[0], args.y.as<T>(), args.y.row_stride,
        args.x.shape[1], width / 2, args.inverse);
  });
  check_launch(kOp);
}

}  // namespace octet::cuda
