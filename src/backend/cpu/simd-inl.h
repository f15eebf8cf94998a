// Vector helpers shared by the kernels, once per instruction set. T is an element type in memory:
// float for F32, uint16_t for BF16. Loads and stores take the count that is left, so a loop reads
//   for (size_t i = 0; i < n; i += Lanes(d)) { … load(d, x + i, n - i) … }
// and a tail lane is computed exactly as a full one.
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "tensor/tensor.h"

#if defined(OCTET_BACKEND_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_SIMD_INL_H_
#undef OCTET_BACKEND_CPU_SIMD_INL_H_
#else
#define OCTET_BACKEND_CPU_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

HWY_INLINE FloatVec load_full(FloatTag d, const float* from) { return hn::LoadU(d, from); }
HWY_INLINE FloatVec load_full(FloatTag d, const uint16_t* from) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

HWY_INLINE void store_full(FloatTag d, FloatVec value, float* to) { hn::StoreU(value, d, to); }
// To nearest, ties to even; NaN stays a quiet NaN: the bytes of tensor::encode_bf16.
HWY_INLINE void store_full(FloatTag, FloatVec value, uint16_t* to) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFF)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  const auto chosen = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(value)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(chosen)), d16, to);
}

template <class T>
HWY_INLINE FloatVec load(FloatTag d, const T* from, size_t left) {
  if (HWY_LIKELY(left >= hn::Lanes(d))) return load_full(d, from);
  T padded[hn::MaxLanes(FloatTag())] = {};
  std::memcpy(padded, from, left * sizeof(T));
  return load_full(d, padded);
}

template <class T>
HWY_INLINE void store(FloatTag d, FloatVec value, T* to, size_t left) {
  if (HWY_LIKELY(left >= hn::Lanes(d))) return store_full(d, value, to);
  T padded[hn::MaxLanes(FloatTag())];
  store_full(d, value, padded);
  std::memcpy(to, padded, left * sizeof(T));
}

// Lanes below `left`.
HWY_INLINE auto first_lanes(FloatTag d, size_t left) {
  return hn::Lt(hn::Iota(d, 0.0f), hn::Set(d, static_cast<float>(left < 64 ? left : 64)));
}

HWY_INLINE float sum_lanes(FloatTag d, FloatVec v) { return hn::GetLane(hn::SumOfLanes(d, v)); }
HWY_INLINE float max_lanes(FloatTag d, FloatVec v) { return hn::GetLane(hn::MaxOfLanes(d, v)); }

// e^x to about one unit in the last place: 0 for −∞, ∞ past 88.7, NaN stays. x = n ln 2 + r with
// |r| ≤ ln 2 / 2, and the Taylor series of e^r to r^7 (its rest is below 2^-27).
HWY_INLINE FloatVec exp(FloatTag d, FloatVec x) {
  const hn::RebindToSigned<FloatTag> di;
  const auto nan = hn::IsNaN(x);
  const auto bounded =
      hn::Min(hn::Max(hn::IfThenZeroElse(nan, x), hn::Set(d, -110.0f)), hn::Set(d, 90.0f));
  const auto n = hn::Round(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), bounded);  // ln 2 in two parts
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  auto y = hn::Set(d, 1.0f / 5040);
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 720));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 120));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 24));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f / 6));
  y = hn::MulAdd(y, r, hn::Set(d, 0.5f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.0f));
  // 2^n in two factors, so that neither over- nor underflows before the product does.
  const auto exponent = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const auto low = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const auto high = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  return hn::IfThenElse(nan, x, hn::Mul(hn::Mul(y, low), high));
}

// 1 / (1 + e^-x)
HWY_INLINE FloatVec sigmoid(FloatTag d, FloatVec x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp(d, hn::Neg(x))));
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#endif
