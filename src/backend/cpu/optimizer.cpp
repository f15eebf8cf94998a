#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/optimizer.cpp"  // NOLINT
#include <cmath>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/simd-inl.h"
#include "ops/adamw_factors.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

using tensor::DType;

void adamw_range(const ops::AdamWFactors& f, const float* gradient, float* master,
                 float* first_moment, float* second_moment, size_t n) {
  const FloatTag d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    const auto g = hn::Mul(load(d, gradient + i, left), hn::Set(d, f.gradient_scale));
    const auto m = hn::Add(hn::Mul(load(d, first_moment + i, left), hn::Set(d, f.beta1)),
                           hn::Mul(g, hn::Set(d, f.one_minus_beta1)));
    const auto v = hn::Add(hn::Mul(load(d, second_moment + i, left), hn::Set(d, f.beta2)),
                           hn::Mul(hn::Mul(g, g), hn::Set(d, f.one_minus_beta2)));
    auto w = load(d, master + i, left);
    w = hn::Sub(w, hn::Mul(w, hn::Set(d, f.decay)));
    const auto root = hn::Mul(hn::Sqrt(v), hn::Set(d, f.second_moment_root));
    const auto step =
        hn::Div(hn::Mul(m, hn::Set(d, f.step_size)), hn::Add(root, hn::Set(d, f.eps)));
    store(d, m, first_moment + i, left);
    store(d, v, second_moment + i, left);
    store(d, hn::Sub(w, step), master + i, left);
  }
}

template <class T>
ops::SquaredNorm squared_norm(const T* x, size_t n) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> d64;
  const size_t lanes = hn::Lanes(d);
  float values[hn::MaxLanes(FloatTag())];
  auto sum = hn::Zero(d64);
  ops::SquaredNorm result;
  const auto largest = hn::Set(d, 3.402823466e38f);
  for (size_t i = 0; i < n; i += lanes) {
    const auto v = load(d, x + i, n - i);
    const auto finite = hn::Le(hn::Abs(v), largest);
    result.non_finite += static_cast<int64_t>(lanes - hn::CountTrue(d, finite));
    hn::StoreU(hn::IfThenElseZero(finite, v), d, values);
    const hn::Rebind<float, decltype(d64)> half;
    for (size_t j = 0; j < lanes; j += hn::Lanes(d64)) {
      const auto wide = hn::PromoteTo(d64, hn::LoadU(half, values + j));
      sum = hn::MulAdd(wide, wide, sum);
    }
  }
  result.sum = hn::GetLane(hn::SumOfLanes(d64, sum));
  return result;
}

ops::SquaredNorm squared_norm_any(DType dtype, const void* x, int64_t offset, size_t n) {
  return dtype == DType::kF32 ? squared_norm(static_cast<const float*>(x) + offset, n)
                              : squared_norm(static_cast<const uint16_t*>(x) + offset, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {
namespace {

constexpr int64_t kRange = 1 << 14;  // elements; part of what fixes the order of squared_norm

int64_t num_ranges(int64_t count) { return (count + kRange - 1) / kRange; }

}  // namespace

void adamw(Context& context, const ops::AdamWArgs& args) {
  constexpr std::string_view kOp = "adamw";
  const int64_t count = args.master.num_elements();
  const std::pair<const char*, const tensor::TensorView*> views[] = {
      {"master", &args.master},
      {"gradient", &args.gradient},
      {"first_moment", &args.first_moment},
      {"second_moment", &args.second_moment}};
  for (const auto& [name, view] : views) {
    require_dtype(kOp, name, *view, tensor::DType::kF32);
    require_contiguous(kOp, name, *view);
    if (view->num_elements() != count || (view->empty() && count > 0)) {
      fail(kOp, "{} must have {} elements, as the master has, but has {}", name, count,
           view->empty() ? 0 : view->num_elements());
    }
  }
  if (args.step < 1) fail(kOp, "step must be at least 1, but is {}", args.step);

  const ops::AdamWFactors factors = ops::adamw_factors(args);
  const auto adamw_range = OCTET_CPU_KERNEL(context.isa, adamw_range);
  parallel(context, num_ranges(count), kRange, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kRange;
    adamw_range(factors, args.gradient.as<float>() + first, args.master.as<float>() + first,
                args.first_moment.as<float>() + first, args.second_moment.as<float>() + first,
                static_cast<size_t>(std::min(end * kRange, count) - first));
  });
}

ops::SquaredNorm squared_norm(Context& context, const tensor::TensorView& x) {
  constexpr std::string_view kOp = "squared_norm";
  require_float(kOp, "x", x);
  require_contiguous(kOp, "x", x);
  const int64_t count = x.num_elements();
  if (count > 0 && x.empty()) fail(kOp, "x is missing");
  const auto squared_norm = OCTET_CPU_KERNEL(context.isa, squared_norm_any);
  auto* parts = context.shared_scratch[0].take<ops::SquaredNorm>(num_ranges(count));
  parallel(context, num_ranges(count), kRange, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      parts[r] = squared_norm(x.dtype, x.data, r * kRange,
                              static_cast<size_t>(std::min(kRange, count - r * kRange)));
    }
  });
  ops::SquaredNorm total;
  for (int64_t r = 0; r < num_ranges(count); ++r) {
    total.sum += parts[r].sum;
    total.non_finite += parts[r].non_finite;
  }
  return total;
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
