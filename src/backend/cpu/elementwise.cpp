#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/elementwise.cpp"  // NOLINT
#include <cstring>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

using ops::Activation;
using tensor::DType;

template <class From, class To>
void scale_row(const From* x, float scale, To* y, size_t n) {
  const FloatTag d;
  const auto factor = hn::Set(d, scale);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    store(d, hn::Mul(load(d, x + i, n - i), factor), y + i, n - i);
  }
}

// y = x · scale
void scale_row_any(DType from, const void* x, float scale, DType to, void* y, size_t n) {
  const auto* x32 = static_cast<const float*>(x);
  const auto* x16 = static_cast<const uint16_t*>(x);
  if (to == DType::kF32) {
    auto* out = static_cast<float*>(y);
    from == DType::kF32 ? scale_row(x32, scale, out, n) : scale_row(x16, scale, out, n);
  } else {
    auto* out = static_cast<uint16_t*>(y);
    from == DType::kF32 ? scale_row(x32, scale, out, n) : scale_row(x16, scale, out, n);
  }
}

// sum[i] += scale · x[i]
template <class T>
void accumulate_row(const T* x, float scale, float* sum, size_t n) {
  const FloatTag d;
  const auto factor = hn::Set(d, scale);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    store(d, hn::Add(load(d, sum + i, left), hn::Mul(load(d, x + i, left), factor)), sum + i, left);
  }
}

void accumulate_row_any(DType dtype, const void* x, int64_t offset, float scale, float* sum,
                        size_t n) {
  if (dtype == DType::kF32) {
    accumulate_row(static_cast<const float*>(x) + offset, scale, sum, n);
  } else {
    accumulate_row(static_cast<const uint16_t*>(x) + offset, scale, sum, n);
  }
}

template <class T>
void add_row(const T* a, const T* b, T* out, size_t n) {
  const FloatTag d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    store(d, hn::Add(load(d, a + i, left), load(d, b + i, left)), out + i, left);
  }
}

void add_row_any(DType dtype, const void* a, const void* b, void* out, size_t n) {
  if (dtype == DType::kF32) {
    add_row(static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(out),
            n);
  } else {
    add_row(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b),
            static_cast<uint16_t*>(out), n);
  }
}

// Both activations are x · sigmoid(u): u = x for SiLU, u = 2 √(2/π) (x + 0.044715 x³) for GELU.
constexpr float kGeluScale = 1.59576912f;
constexpr float kGeluCubic = 0.044715f;

HWY_INLINE FloatVec gate_argument(FloatTag d, FloatVec x, Activation activation) {
  if (activation == Activation::kSilu) return x;
  const auto cubic = hn::Mul(hn::Mul(x, x), hn::Mul(x, hn::Set(d, kGeluCubic)));
  return hn::Mul(hn::Set(d, kGeluScale), hn::Add(x, cubic));
}

template <class T>
void gated_row(const T* gate_up, T* out, size_t n, Activation activation) {
  const FloatTag d;
  const auto one = hn::Set(d, 1.0f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    const auto x = load(d, gate_up + i, left);
    const auto up = load(d, gate_up + n + i, left);
    const auto u = gate_argument(d, x, activation);
    const auto active = hn::Div(x, hn::Add(one, exp(d, hn::Neg(u))));
    store(d, hn::Mul(active, up), out + i, left);
  }
}

void gated_row_any(DType dtype, const void* gate_up, void* out, size_t n, Activation activation) {
  if (dtype == DType::kF32) {
    gated_row(static_cast<const float*>(gate_up), static_cast<float*>(out), n, activation);
  } else {
    gated_row(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), n, activation);
  }
}

// With s = sigmoid(u): d(x s)/dx = s + x s (1 − s) du/dx.
template <class T>
void gated_backward_row(const T* dout, const T* gate_up, T* dgate_up, size_t n,
                        Activation activation) {
  const FloatTag d;
  const auto one = hn::Set(d, 1.0f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    const auto x = load(d, gate_up + i, left);
    const auto up = load(d, gate_up + n + i, left);
    const auto dy = load(d, dout + i, left);
    const auto s = sigmoid(d, gate_argument(d, x, activation));
    const auto active = hn::Mul(x, s);
    auto slope = hn::Mul(active, hn::Sub(one, s));
    if (activation == Activation::kGeluTanh) {
      const auto square = hn::Mul(hn::Mul(x, x), hn::Set(d, 3 * kGeluCubic));
      slope = hn::Mul(slope, hn::Mul(hn::Set(d, kGeluScale), hn::Add(one, square)));
    }
    store(d, hn::Mul(hn::Mul(dy, up), hn::Add(s, slope)), dgate_up + i, left);
    store(d, hn::Mul(dy, active), dgate_up + n + i, left);
  }
}

void gated_backward_row_any(DType dtype, const void* dout, const void* gate_up, void* dgate_up,
                            size_t n, Activation activation) {
  if (dtype == DType::kF32) {
    gated_backward_row(static_cast<const float*>(dout), static_cast<const float*>(gate_up),
                       static_cast<float*>(dgate_up), n, activation);
  } else {
    gated_backward_row(static_cast<const uint16_t*>(dout), static_cast<const uint16_t*>(gate_up),
                       static_cast<uint16_t*>(dgate_up), n, activation);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

void require_ids(std::string_view op, const TensorView& ids, int64_t num_tokens, int64_t lowest,
                 int64_t bound) {
  require_vector(op, "ids", ids, DType::kI32, num_tokens);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t id = *ids.row<int32_t>(t);
    if (id < lowest || id >= bound) {
      fail(op, "id {} of token {} is not in [{}, {})", id, t, lowest, bound);
    }
  }
}

}  // namespace

void embedding(Context& context, const ops::EmbeddingArgs& args) {
  constexpr std::string_view kOp = "embedding";
  require_rank(kOp, "table", args.table, 2, 2);
  require_float(kOp, "table", args.table);
  require_float(kOp, "out", args.out);
  const int64_t num_tokens = args.out.rows();
  const int64_t width = args.table.shape[1];
  require_shape(kOp, "out", args.out, Shape{num_tokens, width});
  require_ids(kOp, args.ids, num_tokens, -1, args.table.shape[0]);

  const auto scale_row = OCTET_CPU_KERNEL(context.isa, scale_row_any);
  parallel(context, num_tokens, width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t id = *args.ids.row<int32_t>(t);
      if (id < 0) {
        std::memset(row_at(args.out, t), 0,
                    static_cast<size_t>(width * tensor::dtype_bytes(args.out.dtype)));
        continue;
      }
      scale_row(args.table.dtype, row_at(args.table, id), args.scale, args.out.dtype,
                row_at(args.out, t), static_cast<size_t>(width));
    }
  });
}

void embedding_backward(Context& context, const ops::EmbeddingBackwardArgs& args) {
  constexpr std::string_view kOp = "embedding_backward";
  require_rank(kOp, "dtable", args.dtable, 2, 2);
  require_dtype(kOp, "dtable", args.dtable, DType::kF32);
  require_float(kOp, "dout", args.dout);
  const int64_t num_tokens = args.dout.rows();
  const int64_t width = args.dtable.shape[1];
  require_shape(kOp, "dout", args.dout, Shape{num_tokens, width});
  require_ids(kOp, args.ids, num_tokens, 0, args.dtable.shape[0]);

  // By columns, so that each sum sees its tokens in their order.
  const auto accumulate_row = OCTET_CPU_KERNEL(context.isa, accumulate_row_any);
  const int64_t slice = column_slice(context, width);
  parallel(context, (width + slice - 1) / slice, slice * num_tokens,
           [&](int64_t begin, int64_t end, int) {
             const int64_t first = begin * slice;
             const int64_t count = std::min(end * slice, width) - first;
             for (int64_t t = 0; t < num_tokens; ++t) {
               accumulate_row(args.dout.dtype, row_at(args.dout, t), first, args.scale,
                              args.dtable.row<float>(*args.ids.row<int32_t>(t)) + first,
                              static_cast<size_t>(count));
             }
           });
}

void add(Context& context, const ops::AddArgs& args) {
  constexpr std::string_view kOp = "add";
  require_rank(kOp, "out", args.out, 1, 4);
  require_float(kOp, "out", args.out);
  for (const TensorView* operand : {&args.a, &args.b}) {
    const char* name = operand == &args.a ? "a" : "b";
    require_shape(kOp, name, *operand, args.out.shape);
    require_dtype(kOp, name, *operand, args.out.dtype);
  }
  const auto add_row = OCTET_CPU_KERNEL(context.isa, add_row_any);
  const int64_t width = args.out.row_elements();
  parallel(context, args.out.rows(), width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      add_row(args.out.dtype, row_at(args.a, t), row_at(args.b, t), row_at(args.out, t),
              static_cast<size_t>(width));
    }
  });
}

void gated_activation(Context& context, const ops::GatedActivationArgs& args) {
  constexpr std::string_view kOp = "gated_activation";
  require_rank(kOp, "out", args.out, 2, 2);
  require_float(kOp, "out", args.out);
  const int64_t num_tokens = args.out.shape[0];
  const int64_t width = args.out.shape[1];
  require_shape(kOp, "gate_up", args.gate_up, Shape{num_tokens, 2 * width});
  require_dtype(kOp, "gate_up", args.gate_up, args.out.dtype);

  const auto gated_row = OCTET_CPU_KERNEL(context.isa, gated_row_any);
  parallel(context, num_tokens, 4 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      gated_row(args.out.dtype, row_at(args.gate_up, t), row_at(args.out, t),
                static_cast<size_t>(width), args.activation);
    }
  });
}

void gated_activation_backward(Context& context, const ops::GatedActivationBackwardArgs& args) {
  constexpr std::string_view kOp = "gated_activation_backward";
  require_rank(kOp, "dout", args.dout, 2, 2);
  require_float(kOp, "dout", args.dout);
  const int64_t num_tokens = args.dout.shape[0];
  const int64_t width = args.dout.shape[1];
  for (const TensorView* pair : {&args.gate_up, &args.dgate_up}) {
    const char* name = pair == &args.gate_up ? "gate_up" : "dgate_up";
    require_shape(kOp, name, *pair, Shape{num_tokens, 2 * width});
    require_dtype(kOp, name, *pair, args.dout.dtype);
  }
  const auto gated_backward_row = OCTET_CPU_KERNEL(context.isa, gated_backward_row_any);
  parallel(context, num_tokens, 6 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      gated_backward_row(args.dout.dtype, row_at(args.dout, t), row_at(args.gate_up, t),
                         row_at(args.dgate_up, t), static_cast<size_t>(width), args.activation);
    }
  });
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
