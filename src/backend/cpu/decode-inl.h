// Two vectors of F32 from 8-bit codes, in registers; for AVX2 and AVX-512.
#include <cstdint>

#include <hwy/highway.h>

#include "tensor/tensor.h"

#if defined(OCTET_BACKEND_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_DECODE_INL_H_
#undef OCTET_BACKEND_CPU_DECODE_INL_H_
#else
#define OCTET_BACKEND_CPU_DECODE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using HalfWords = hwy::HWY_NAMESPACE::ScalableTag<uint16_t>;
using HalfVec = hwy::HWY_NAMESPACE::Vec<HalfWords>;
using DecodedVec = hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::ScalableTag<float>>;

// The codes as F16. E5M2 is the upper half of F16. An E4M3 code, moved down by a bit from there
// under its sign, is 2^-8 of its value; its NaN becomes one of F16.
template <tensor::DType kFormat>
HWY_INLINE HalfVec to_f16(HalfVec high) {
  namespace hn = hwy::HWY_NAMESPACE;
  const HalfWords d16;
  if constexpr (kFormat == tensor::DType::kE5M2) return high;
  const hn::RebindToSigned<HalfWords> s16;
  const HalfVec nan = hn::Set(d16, 0x7F00);
  const HalfVec moved =
      hn::And(hn::BitCast(d16, hn::ShiftRight<1>(hn::BitCast(s16, high))), hn::Set(d16, 0xBFFF));
  return hn::IfThenElse(hn::Eq(hn::And(high, nan), nan), high, moved);
}

// The conversion takes subnormal F16 at full speed.
template <tensor::DType kFormat>
HWY_INLINE void decode_two_vectors(const uint8_t* codes, DecodedVec& low, DecodedVec& high) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> f32;
  const HalfWords d16;
  const hn::Rebind<uint8_t, HalfWords> d8;
  const hn::Half<hn::Repartition<hwy::float16_t, HalfWords>> f16;
  const HalfVec half = to_f16<kFormat>(hn::ShiftLeft<8>(hn::PromoteTo(d16, hn::LoadU(d8, codes))));
  low = hn::PromoteTo(f32, hn::BitCast(f16, hn::LowerHalf(half)));
  high = hn::PromoteTo(f32, hn::BitCast(f16, hn::UpperHalf(hn::Half<HalfWords>(), half)));
  if constexpr (kFormat == tensor::DType::kE4M3) {
    low = hn::Mul(low, hn::Set(f32, 256.0f));
    high = hn::Mul(high, hn::Set(f32, 256.0f));
  }
}
#endif

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
