// The definition of BF16, E4M3 and E5M2: one value at a time, exact, the oracle of every vector
// routine. E4M3 is the "FN" variant (no infinity, NaN = 0x7F/0xFF, largest 448); E5M2 follows IEEE
// (largest finite 57344). OCP 8-bit Floating Point Specification 1.0; numerics in docs/numerics.md.
#pragma once

#include <bit>
#include <cstdint>

namespace octet::tensor {

inline constexpr float kMaxE4M3 = 448.0f;
inline constexpr float kMaxE5M2 = 57344.0f;

// Round to nearest, ties to even; NaN stays NaN (quiet).
inline uint16_t encode_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
inline float decode_bf16(uint16_t code) {
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
}
inline float round_bf16(float value) { return decode_bf16(encode_bf16(value)); }

float decode_f16(uint16_t code);
uint16_t encode_f16(float value);  // round to nearest even, overflow to infinity

// Round to nearest, ties to even, saturating: |x| > 448 and infinities give ±448; NaN gives
// 0x7F (sign kept); −0 keeps its sign.
uint8_t encode_e4m3(float value);
float decode_e4m3(uint8_t code);

// The same for E5M2; saturates to ±57344; NaN gives 0x7F (sign kept).
uint8_t encode_e5m2(float value);
float decode_e5m2(uint8_t code);

}  // namespace octet::tensor
