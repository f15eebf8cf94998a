// The vectors of the linear products, one instruction set at a time.
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "backend/cpu/gemm_kernels.h"

#if defined(OCTET_BACKEND_CPU_GEMM_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_GEMM_VECTORS_INL_H_
#undef OCTET_BACKEND_CPU_GEMM_VECTORS_INL_H_
#else
#define OCTET_BACKEND_CPU_GEMM_VECTORS_INL_H_
#endif

#ifndef OCTET_UNROLL
#define OCTET_UNROLL _Pragma("GCC unroll 8")
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, kMaxLanes>;
using FloatVec = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));
HWY_INLINE FloatVec zeros() { return hn::Zero(F32()); }
HWY_INLINE FloatVec all(float value) { return hn::Set(F32(), value); }
HWY_INLINE FloatVec load(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE void store(FloatVec v, float* to) { hn::StoreU(v, F32(), to); }
// Keeps v in a register: the compiler would load it again for each product, and loads are scarce.
HWY_INLINE FloatVec load_once(const float* from) {
  FloatVec v = load(from);
  asm("" : "+v"(v.raw));
  return v;
}
HWY_INLINE FloatVec add(FloatVec x, FloatVec y) { return hn::Add(x, y); }
HWY_INLINE FloatVec multiply(FloatVec x, FloatVec y) { return hn::Mul(x, y); }
HWY_INLINE FloatVec multiply_add(FloatVec x, FloatVec y, FloatVec z) { return hn::MulAdd(x, y, z); }

// out[j] = the sum of the lanes of v[j]: in each 128 bits (0 + 2) + (1 + 3), then these in order.
HWY_INLINE void store_sums(const FloatVec (&v)[kDotColumns], float* out) {
  const F32 df;
  const hn::Repartition<double, F32> dd;
  const auto fold = [df](FloatVec x, FloatVec y) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(df, x, y), hn::InterleaveUpper(df, x, y));
  };
  const auto low = hn::BitCast(dd, fold(v[0], v[1]));
  const auto high = hn::BitCast(dd, fold(v[2], v[3]));
  const FloatVec sums = hn::Add(hn::BitCast(df, hn::InterleaveLower(dd, low, high)),
                                hn::BitCast(df, hn::InterleaveUpper(dd, low, high)));
  const hn::Half<F32> half;
  const auto low_parts = hn::LowerHalf(half, sums);
  const auto high_parts = hn::UpperHalf(half, sums);
  if constexpr (kLanes == 16) {
    const hn::Half<decltype(half)> quarter;
    const auto two = hn::Add(hn::LowerHalf(quarter, low_parts), hn::UpperHalf(quarter, low_parts));
    const auto three = hn::Add(two, hn::LowerHalf(quarter, high_parts));
    hn::StoreU(hn::Add(three, hn::UpperHalf(quarter, high_parts)), quarter, out);
  } else {
    hn::StoreU(hn::Add(low_parts, high_parts), half, out);
  }
}
#else
// Highway's baseline has one lane or four, as the compiler's version has it; the compiler's own
// vectors always have four, and no fused multiply-add, so the bytes are the same everywhere.
using FloatVec = float __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4;
HWY_INLINE FloatVec zeros() { return FloatVec{}; }
HWY_INLINE FloatVec all(float value) { return FloatVec{value, value, value, value}; }
HWY_INLINE FloatVec load(const float* from) {
  FloatVec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
HWY_INLINE FloatVec load_once(const float* from) { return load(from); }
HWY_INLINE void store(FloatVec v, float* to) { std::memcpy(to, &v, sizeof(v)); }
HWY_INLINE FloatVec add(FloatVec x, FloatVec y) { return x + y; }
HWY_INLINE FloatVec multiply(FloatVec x, FloatVec y) { return x * y; }
HWY_INLINE FloatVec multiply_add(FloatVec x, FloatVec y, FloatVec z) { return x * y + z; }

HWY_INLINE void store_sums(const FloatVec (&v)[kDotColumns], float* out) {
  for (int64_t j = 0; j < kDotColumns; ++j) out[j] = (v[j][0] + v[j][2]) + (v[j][1] + v[j][3]);
}
#endif

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
