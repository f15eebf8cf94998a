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

// The codes as F16. E5M2 is the upper half of F16. The magnitude of an E4M3 code, moved up by 7, is
// 2^-8 of its value; the step after its largest carries into the bit that makes its NaN one of F16.
template <tensor::DType kFormat>
HWY_INLINE HalfVec load_as_f16(const uint8_t* codes) {
  namespace hn = hwy::HWY_NAMESPACE;
  const HalfWords d16;
  if constexpr (kFormat == tensor::DType::kE5M2) {
    return hn::ShiftLeft<8>(hn::PromoteTo(d16, hn::LoadU(hn::Rebind<uint8_t, HalfWords>(), codes)));
  }
  const hn::RebindToSigned<HalfWords> s16;
  const hn::Rebind<int8_t, HalfWords> s8;
  const auto extended = hn::PromoteTo(s16, hn::LoadU(s8, reinterpret_cast<const int8_t*>(codes)));
  const HalfVec moved = hn::And(hn::BitCast(d16, hn::ShiftLeft<7>(extended)), hn::Set(d16, 0xBFFF));
  const HalfVec next = hn::Add(moved, hn::Set(d16, 0x0080));
  return hn::OrAnd(moved, next, hn::Set(d16, 0x4000));
}

// The conversion takes subnormal F16 at full speed.
template <tensor::DType kFormat>
HWY_INLINE void decode_two_vectors(const uint8_t* codes, DecodedVec& low, DecodedVec& high) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> f32;
  const hn::Half<hn::Repartition<hwy::float16_t, HalfWords>> f16;
  const HalfVec half = load_as_f16<kFormat>(codes);
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
