#include "backend/cpu/codec_kernels.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/dispatch.h"
#include "tensor/codec.h"

namespace octet::cpu {
const float* decode_table(tensor::DType format);  // the value of each code
}

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/codec_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using U8 = hn::Rebind<uint8_t, F32>;
using FloatVec = hn::Vec<F32>;
using WordVec = hn::Vec<U32>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

// out[i] = transform(x[i]), a vector at a time; the last vector goes through padded copies.
// The transform takes (pointer to a vector of inputs, index of its first, pointer to its outputs).
template <class In, class Out, class Transform>
HWY_INLINE void for_each_vector(const In* x, int64_t count, Out* out, const Transform& transform) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) transform(x + i, i, out + i);
  if (kLanes == 1 || i == count) return;
  In padded[kLanes] = {};
  Out result[kLanes];
  std::memcpy(padded, x + i, static_cast<size_t>(count - i) * sizeof(In));
  transform(padded, i, result);
  std::memcpy(out + i, result, static_cast<size_t>(count - i) * sizeof(Out));
}

// The upper half holds the BF16 code, rounded to nearest even; a NaN becomes quiet.
HWY_INLINE WordVec rounded_bits(FloatVec x) {
  const U32 du;
  const WordVec bits = hn::BitCast(du, x);
  const WordVec odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const WordVec rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
  const auto is_nan = hn::Gt(hn::And(bits, hn::Set(du, 0x7FFFFFFF)), hn::Set(du, 0x7F800000));
  return hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(du, 0x400000)), rounded);
}

void bf16_to_f32(const uint16_t* x, int64_t count, float* out) {
  for_each_vector(x, count, out, [](const uint16_t* from, int64_t, float* to) HWY_ATTR {
    const WordVec bits = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
    hn::StoreU(hn::BitCast(F32(), bits), F32(), to);
  });
}

void f32_to_bf16(const float* x, int64_t count, uint16_t* out) {
  for_each_vector(x, count, out, [](const float* from, int64_t, uint16_t* to) HWY_ATTR {
    const WordVec bits = rounded_bits(hn::LoadU(F32(), from));
    hn::StoreU(hn::TruncateTo(U16(), hn::ShiftRight<16>(bits)), U16(), to);
  });
}

void round_to_bf16(const float* x, int64_t count, float* out) {
  for_each_vector(x, count, out, [](const float* from, int64_t, float* to) HWY_ATTR {
    const WordVec bits = rounded_bits(hn::LoadU(F32(), from));
    hn::StoreU(hn::BitCast(F32(), hn::And(bits, hn::Set(U32(), 0xFFFF0000u))), F32(), to);
  });
}

void multiply(const float* x, const float* y, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(F32(), x + i), hn::LoadU(F32(), y + i)), F32(), out + i);
  }
  for (; i < count; ++i) out[i] = x[i] * y[i];
}

void multiply_by(const float* x, float factor, int64_t count, float* out) {
  for_each_vector(x, count, out, [factor](const float* from, int64_t, float* to) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(F32(), from), hn::Set(F32(), factor)), F32(), to);
  });
}

// |x| as bits, which order like the values; 0 for infinities and NaN.
HWY_INLINE WordVec finite_magnitude(FloatVec x) {
  const U32 du;
  const WordVec bits = hn::And(hn::BitCast(du, x), hn::Set(du, 0x7FFFFFFF));
  return hn::IfThenElseZero(hn::Lt(bits, hn::Set(du, 0x7F800000)), bits);
}

float largest(const float* x, int64_t count) {
  WordVec running = hn::Zero(U32());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    running = hn::Max(running, finite_magnitude(hn::LoadU(F32(), x + i)));
  }
  if (kLanes > 1 && i < count) {
    float padded[kLanes] = {};
    std::memcpy(padded, x + i, static_cast<size_t>(count - i) * sizeof(float));
    running = hn::Max(running, finite_magnitude(hn::LoadU(F32(), padded)));
  }
  return hn::GetLane(hn::MaxOfLanes(F32(), hn::BitCast(F32(), running)));
}

HWY_INLINE void raise_to(const float* x, float* running) {
  const WordVec before = hn::BitCast(U32(), hn::LoadU(F32(), running));
  const WordVec most = hn::Max(before, finite_magnitude(hn::LoadU(F32(), x)));
  hn::StoreU(hn::BitCast(F32(), most), F32(), running);
}

void largest_by_column(const float* x, int64_t count, float* running) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) raise_to(x + i, running + i);
  if (kLanes == 1 || i == count) return;
  const auto num_bytes = static_cast<size_t>(count - i) * sizeof(float);
  float values[kLanes] = {};
  float before[kLanes] = {};
  std::memcpy(values, x + i, num_bytes);
  std::memcpy(before, running + i, num_bytes);
  raise_to(values, before);
  std::memcpy(running + i, before, num_bytes);
}

// Where one 8-bit format lies inside F32: the code of a normal value is its rounded bits, less the
// difference of the exponents' biases; adding `aligner` rounds a smaller one to whole steps.
struct E4M3 {
  static constexpr int kShift = 20;
  static constexpr uint32_t kBiasDifference = (127 - 7) << 3;
  static constexpr float kSmallestNormal = 0x1p-6f;
  static constexpr float kAligner = 0x1p14f;
  static constexpr float kLargest = tensor::kMaxE4M3;
  static constexpr uint32_t kLargestCode = 0x7E;
};
struct E5M2 {
  static constexpr int kShift = 21;
  static constexpr uint32_t kBiasDifference = (127 - 15) << 2;
  static constexpr float kSmallestNormal = 0x1p-14f;
  static constexpr float kAligner = 0x1p7f;
  static constexpr float kLargest = tensor::kMaxE5M2;
  static constexpr uint32_t kLargestCode = 0x7B;
};

HWY_INLINE int64_t count(hn::Mask<U32> mask) {
  return static_cast<int64_t>(hn::CountTrue(U32(), mask));
}

template <class Format>
HWY_INLINE WordVec encode_vector(FloatVec x, FloatVec scale, ops::QuantizeCounters& counters) {
  const F32 df;
  const U32 du;
  const WordVec bits = hn::BitCast(du, hn::Div(x, scale));
  const WordVec magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
  const auto is_nan = hn::Gt(magnitude, hn::Set(du, 0x7F800000));
  const FloatVec clamped =
      hn::BitCast(df, hn::Min(magnitude, hn::BitCast(du, hn::Set(df, Format::kLargest))));
  const WordVec clamped_bits = hn::BitCast(du, clamped);

  const WordVec odd = hn::And(hn::ShiftRight<Format::kShift>(clamped_bits), hn::Set(du, 1));
  const WordVec half = hn::Set(du, (1u << (Format::kShift - 1)) - 1);
  const WordVec normal =
      hn::Sub(hn::ShiftRight<Format::kShift>(hn::Add(clamped_bits, hn::Add(odd, half))),
              hn::Set(du, Format::kBiasDifference));
  const FloatVec aligner = hn::Set(df, Format::kAligner);
  const WordVec small =
      hn::Sub(hn::BitCast(du, hn::Add(clamped, aligner)), hn::BitCast(du, aligner));
  WordVec code = hn::IfThenElse(
      hn::Lt(clamped_bits, hn::BitCast(du, hn::Set(df, Format::kSmallestNormal))), small, normal);
  code = hn::IfThenElse(is_nan, hn::Set(du, 0x7F), code);

  const WordVec given = hn::And(hn::BitCast(du, x), hn::Set(du, 0x7FFFFFFF));
  const auto underflows = hn::And(hn::Eq(code, hn::Zero(du)), hn::Ne(given, hn::Zero(du)));
  counters.saturated += count(hn::Eq(code, hn::Set(du, Format::kLargestCode)));
  counters.underflowed += count(underflows);
  counters.not_a_number += count(is_nan);
  return hn::Or(code, hn::ShiftLeft<7>(hn::ShiftRight<31>(bits)));
}

// `scales` has one entry per element, or one for all.
template <class Format, bool kByColumn>
void encode_as(const float* x, int64_t count, const float* scales, uint8_t* codes,
               ops::QuantizeCounters& counters) {
  // The counters are of this call, so that they stay in registers.
  ops::QuantizeCounters found;
  const FloatVec common = hn::Set(F32(), scales[0]);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const FloatVec scale = kByColumn ? hn::LoadU(F32(), scales + i) : common;
    const WordVec code = encode_vector<Format>(hn::LoadU(F32(), x + i), scale, found);
    hn::StoreU(hn::TruncateTo(U8(), code), U8(), codes + i);
  }
  if (kLanes > 1 && i < count) {
    const auto rest = static_cast<size_t>(count - i);
    float values[kLanes] = {};
    float divisors[kLanes];
    uint8_t result[kLanes];
    for (float& divisor : divisors) divisor = scales[0];
    std::memcpy(values, x + i, rest * sizeof(float));
    if (kByColumn) std::memcpy(divisors, scales + i, rest * sizeof(float));
    const WordVec code =
        encode_vector<Format>(hn::LoadU(F32(), values), hn::LoadU(F32(), divisors), found);
    hn::StoreU(hn::TruncateTo(U8(), code), U8(), result);
    std::memcpy(codes + i, result, rest);
  }
  counters.elements += count;
  counters.saturated += found.saturated;
  counters.underflowed += found.underflowed;
  counters.not_a_number += found.not_a_number;
}

void encode(const float* x, int64_t count, float scale, tensor::DType format, uint8_t* codes,
            ops::QuantizeCounters& counters) {
  if (format == tensor::DType::kE4M3) {
    encode_as<E4M3, false>(x, count, &scale, codes, counters);
  } else {
    encode_as<E5M2, false>(x, count, &scale, codes, counters);
  }
}

void encode_by_column(const float* x, int64_t count, const float* scales, tensor::DType format,
                      uint8_t* codes, ops::QuantizeCounters& counters) {
  if (format == tensor::DType::kE4M3) {
    encode_as<E4M3, true>(x, count, scales, codes, counters);
  } else {
    encode_as<E5M2, true>(x, count, scales, codes, counters);
  }
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
template <tensor::DType kFormat>
void decode_as(const uint8_t* codes, int64_t count, float* out) {
  int64_t i = 0;
  const auto decode_two = [](const uint8_t* from, float* to) HWY_ATTR {
    FloatVec low, high;
    decode_two_vectors<kFormat>(from, low, high);
    hn::StoreU(low, F32(), to);
    hn::StoreU(high, F32(), to + kLanes);
  };
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) decode_two(codes + i, out + i);
  if (i == count) return;
  uint8_t padded[2 * kLanes] = {};
  float values[2 * kLanes];
  std::memcpy(padded, codes + i, static_cast<size_t>(count - i));
  decode_two(padded, values);
  std::memcpy(out + i, values, static_cast<size_t>(count - i) * sizeof(float));
}

void decode(const uint8_t* codes, int64_t count, tensor::DType format, float* out) {
  if (format == tensor::DType::kE4M3) {
    decode_as<tensor::DType::kE4M3>(codes, count, out);
  } else {
    decode_as<tensor::DType::kE5M2>(codes, count, out);
  }
}
#else
void decode(const uint8_t* codes, int64_t count, tensor::DType format, float* out) {
  const float* table = decode_table(format);
  for (int64_t i = 0; i < count; ++i) out[i] = table[codes[i]];
}
#endif

constexpr CodecKernels kKernels = {
    bf16_to_f32, f32_to_bf16,       round_to_bf16, multiply,         multiply_by,
    largest,     largest_by_column, encode,        encode_by_column, decode,
};

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {

const float* decode_table(tensor::DType format) {
  struct Tables {
    float e4m3[256];
    float e5m2[256];
    Tables() {
      for (int code = 0; code < 256; ++code) {
        e4m3[code] = tensor::decode_e4m3(static_cast<uint8_t>(code));
        e5m2[code] = tensor::decode_e5m2(static_cast<uint8_t>(code));
      }
    }
  };
  static const Tables tables;
  return format == tensor::DType::kE4M3 ? tables.e4m3 : tables.e5m2;
}

const CodecKernels& codec_kernels(Isa isa) { return OCTET_CPU_KERNEL(isa, kKernels); }

}  // namespace octet::cpu
#endif
