#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rms_norm.cpp"  // NOLINT
#include <cmath>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

using tensor::DType;

// out = weight + offset, in F32
template <class T>
void offset_weight(const T* weight, float offset, float* out, size_t n) {
  const FloatTag d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    store(d, hn::Add(load(d, weight + i, n - i), hn::Set(d, offset)), out + i, n - i);
  }
}

void offset_weight_any(DType dtype, const void* weight, float offset, float* out, size_t n) {
  if (dtype == DType::kF32) {
    offset_weight(static_cast<const float*>(weight), offset, out, n);
  } else {
    offset_weight(static_cast<const uint16_t*>(weight), offset, out, n);
  }
}

HWY_INLINE float inverse_rms(float sum_of_squares, size_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

// Σ x², four running vectors folded in one order.
template <class T>
HWY_INLINE float sum_of_squares(const T* x, size_t n) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto x0 = load_full(d, x + i), x1 = load_full(d, x + i + lanes);
    const auto x2 = load_full(d, x + i + 2 * lanes), x3 = load_full(d, x + i + 3 * lanes);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  for (; i < n; i += lanes) {
    const auto v = load(d, x + i, n - i);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  return sum_lanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

template <class T>
void norm_rows(const T* x, const float* weight, T* y, size_t num_rows, size_t n, float eps) {
  const FloatTag d;
  for (size_t r = 0; r < num_rows; ++r, x += n, y += n) {
    const auto inverse = hn::Set(d, inverse_rms(sum_of_squares(x, n), n, eps));
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      const auto normed = hn::Mul(load(d, x + i, n - i), inverse);
      store(d, hn::Mul(normed, load(d, weight + i, n - i)), y + i, n - i);
    }
  }
}

void norm_rows_any(DType dtype, const void* x, const float* weight, void* y, size_t num_rows,
                   size_t n, float eps) {
  if (dtype == DType::kF32) {
    norm_rows(static_cast<const float*>(x), weight, static_cast<float*>(y), num_rows, n, eps);
  } else {
    norm_rows(static_cast<const uint16_t*>(x), weight, static_cast<uint16_t*>(y), num_rows, n, eps);
  }
}

// stats[2 r] = 1/rms, stats[2 r + 1] = Σ dy · weight · x
template <class T>
void backward_stats(const T* dy, const T* x, const float* weight, float* stats, size_t num_rows,
                    size_t n, float eps) {
  const FloatTag d;
  for (size_t r = 0; r < num_rows; ++r, x += n, dy += n) {
    auto dot = hn::Zero(d);
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      const size_t left = n - i;
      const auto scaled = hn::Mul(load(d, dy + i, left), load(d, weight + i, left));
      dot = hn::MulAdd(scaled, load(d, x + i, left), dot);
    }
    stats[2 * r] = inverse_rms(sum_of_squares(x, n), n, eps);
    stats[2 * r + 1] = sum_lanes(d, dot);
  }
}

void backward_stats_any(DType dtype, const void* dy, const void* x, const float* weight,
                        float* stats, size_t num_rows, size_t n, float eps) {
  if (dtype == DType::kF32) {
    backward_stats(static_cast<const float*>(dy), static_cast<const float*>(x), weight, stats,
                   num_rows, n, eps);
  } else {
    backward_stats(static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), weight, stats,
                   num_rows, n, eps);
  }
}

// dweight[first …] += Σ_rows dy · (x / rms), rows of n, `count` columns from `first`.
template <class T>
void backward_weight(const T* dy, const T* x, const float* stats, float* dweight, size_t num_rows,
                     size_t n, size_t first, size_t count) {
  const FloatTag d;
  for (size_t r = 0; r < num_rows; ++r) {
    const auto inverse = hn::Set(d, stats[2 * r]);
    for (size_t i = 0; i < count; i += hn::Lanes(d)) {
      const size_t left = count - i;
      const size_t at = r * n + first + i;
      const auto normed = hn::Mul(load(d, x + at, left), inverse);
      const auto sum =
          hn::MulAdd(load(d, dy + at, left), normed, load(d, dweight + first + i, left));
      store(d, sum, dweight + first + i, left);
    }
  }
}

void backward_weight_any(DType dtype, const void* dy, const void* x, const float* stats,
                         float* dweight, size_t num_rows, size_t n, size_t first, size_t count) {
  if (dtype == DType::kF32) {
    backward_weight(static_cast<const float*>(dy), static_cast<const float*>(x), stats, dweight,
                    num_rows, n, first, count);
  } else {
    backward_weight(static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), stats,
                    dweight, num_rows, n, first, count);
  }
}

// dx = weight dy / rms − x (Σ dy weight x) / (n rms³)
template <class T>
void backward_input(const T* dy, const T* x, const float* weight, const float* stats, T* dx,
                    size_t num_rows, size_t n, bool accumulate) {
  const FloatTag d;
  for (size_t r = 0; r < num_rows; ++r, x += n, dy += n, dx += n) {
    const float inverse = stats[2 * r];
    const float mean_dot = stats[2 * r + 1] / static_cast<float>(n);
    const auto scale = hn::Set(d, inverse);
    const auto pull = hn::Set(d, inverse * inverse * inverse * mean_dot);
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      const size_t left = n - i;
      const auto scaled = hn::Mul(load(d, dy + i, left), load(d, weight + i, left));
      auto value = hn::NegMulAdd(load(d, x + i, left), pull, hn::Mul(scaled, scale));
      if (accumulate) value = hn::Add(load(d, dx + i, left), value);
      store(d, value, dx + i, left);
    }
  }
}

void backward_input_any(DType dtype, const void* dy, const void* x, const float* weight,
                        const float* stats, void* dx, size_t num_rows, size_t n, bool accumulate) {
  if (dtype == DType::kF32) {
    backward_input(static_cast<const float*>(dy), static_cast<const float*>(x), weight, stats,
                   static_cast<float*>(dx), num_rows, n, accumulate);
  } else {
    backward_input(static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), weight, stats,
                   static_cast<uint16_t*>(dx), num_rows, n, accumulate);
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

// `num_tokens` steps of the first axis, each `heads` rows of `width` next to each other.
struct Rows {
  int64_t num_tokens, heads, width;
};

Rows check_rows(std::string_view op, const TensorView& x, const TensorView& weight) {
  require_rank(op, "x", x, 2, 3);
  require_float(op, "x", x);
  require_float(op, "weight", weight);
  const Rows rows{x.shape[0], x.shape.rank() == 3 ? x.shape[1] : 1, x.shape[x.shape.rank() - 1]};
  require_shape(op, "weight", weight, Shape{rows.width});
  return rows;
}

void require_like(std::string_view op, std::string_view name, const TensorView& view,
                  const TensorView& x) {
  require_shape(op, name, view, x.shape);
  require_dtype(op, name, view, x.dtype);
}

float* offset_weight(Context& context, const TensorView& weight, float offset) {
  const int64_t width = weight.shape[0];
  float* out = context.shared_scratch[0].take<float>(width);
  OCTET_CPU_KERNEL(context.isa, offset_weight_any)
  (weight.dtype, weight.data, offset, out, static_cast<size_t>(width));
  return out;
}

}  // namespace

void rms_norm(Context& context, const ops::RmsNormArgs& args) {
  constexpr std::string_view kOp = "rms_norm";
  const Rows rows = check_rows(kOp, args.x, args.weight);
  require_like(kOp, "y", args.y, args.x);

  const float* weight = offset_weight(context, args.weight, args.weight_offset);
  const auto norm_rows = OCTET_CPU_KERNEL(context.isa, norm_rows_any);
  parallel(
      context, rows.num_tokens, 2 * rows.heads * rows.width, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          norm_rows(args.x.dtype, row_at(args.x, t), weight, row_at(args.y, t),
                    static_cast<size_t>(rows.heads), static_cast<size_t>(rows.width), args.eps);
        }
      });
}

void rms_norm_backward(Context& context, const ops::RmsNormBackwardArgs& args) {
  constexpr std::string_view kOp = "rms_norm_backward";
  const Rows rows = check_rows(kOp, args.x, args.weight);
  require_like(kOp, "dy", args.dy, args.x);
  require_like(kOp, "dx", args.dx, args.x);
  if (!args.dweight.empty()) {
    require_vector(kOp, "dweight", args.dweight, DType::kF32, rows.width);
  }
  const DType dtype = args.x.dtype;
  const auto heads = static_cast<size_t>(rows.heads);
  const auto width = static_cast<size_t>(rows.width);
  const float* weight = offset_weight(context, args.weight, args.weight_offset);
  float* stats = context.shared_scratch[1].take<float>(2 * rows.num_tokens * rows.heads);

  const auto backward_stats = OCTET_CPU_KERNEL(context.isa, backward_stats_any);
  parallel(context, rows.num_tokens, 2 * rows.heads * rows.width,
           [&](int64_t begin, int64_t end, int) {
             for (int64_t t = begin; t < end; ++t) {
               backward_stats(dtype, row_at(args.dy, t), row_at(args.x, t), weight,
                              stats + 2 * t * rows.heads, heads, width, args.eps);
             }
           });

  // Before dx, which may lie where dy or x does; by columns, so that each sum sees its rows in
  // their order.
  if (!args.dweight.empty()) {
    const auto backward_weight = OCTET_CPU_KERNEL(context.isa, backward_weight_any);
    const int64_t slice = column_slice(context, rows.width);
    parallel(context, (rows.width + slice - 1) / slice, 2 * slice * rows.num_tokens * rows.heads,
             [&](int64_t begin, int64_t end, int) {
               const int64_t first = begin * slice;
               const int64_t count = std::min(end * slice, rows.width) - first;
               for (int64_t t = 0; t < rows.num_tokens; ++t) {
                 backward_weight(dtype, row_at(args.dy, t), row_at(args.x, t),
                                 stats + 2 * t * rows.heads, args.dweight.as<float>(), heads, width,
                                 static_cast<size_t>(first), static_cast<size_t>(count));
               }
             });
  }

  const auto backward_input = OCTET_CPU_KERNEL(context.isa, backward_input_any);
  parallel(context, rows.num_tokens, 3 * rows.heads * rows.width,
           [&](int64_t begin, int64_t end, int) {
             for (int64_t t = begin; t < end; ++t) {
               backward_input(dtype, row_at(args.dy, t), row_at(args.x, t), weight,
                              stats + 2 * t * rows.heads, row_at(args.dx, t), heads, width,
                              args.accumulate);
             }
           });
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
