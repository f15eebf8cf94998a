#include "tensor/codec.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octet::tensor {
namespace {

// One 8-bit float: `mantissa_bits` of fraction, exponent bias `bias`, largest finite value
// `largest` with code `largest_code`.
struct Format {
  int mantissa_bits;
  int bias;
  float largest;
  uint8_t largest_code;
};
constexpr Format kE4M3{3, 7, kMaxE4M3, 0x7E};
constexpr Format kE5M2{2, 15, kMaxE5M2, 0x7B};

uint8_t encode(float value, const Format& format) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0x00;
  if (std::isnan(value)) return sign | 0x7F;
  const float magnitude = std::fabs(value);
  if (magnitude >= format.largest) return sign | format.largest_code;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
  exponent = std::max(exponent - 1, 1 - format.bias);
  // The spacing of codes at this exponent; both scalings are exact.
  const float steps = std::ldexp(magnitude, format.mantissa_bits - exponent);
  const auto rounded = static_cast<int>(std::nearbyint(steps));  // ties to even
  // A carry into the next exponent is the right code by itself; subnormals have exponent field 0.
  const int code = rounded + ((exponent + format.bias - 1) << format.mantissa_bits);
  return sign | static_cast<uint8_t>(std::min<int>(code, format.largest_code));
}

float decode_magnitude(int code, const Format& format) {
  const int exponent = code >> format.mantissa_bits;
  const int fraction = code & ((1 << format.mantissa_bits) - 1);
  const int hidden = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  return std::ldexp(static_cast<float>(hidden + fraction),
                    std::max(exponent, 1) - format.bias - format.mantissa_bits);
}

}  // namespace

uint8_t encode_e4m3(float value) { return encode(value, kE4M3); }
uint8_t encode_e5m2(float value) { return encode(value, kE5M2); }

float decode_e4m3(uint8_t code) {
  const int magnitude = code & 0x7F;
  const float value = magnitude == 0x7F ? std::numeric_limits<float>::quiet_NaN()
                                        : decode_magnitude(magnitude, kE4M3);
  return code & 0x80 ? -value : value;
}

float decode_e5m2(uint8_t code) {
  const int magnitude = code & 0x7F;
  const float value = magnitude > 0x7C    ? std::numeric_limits<float>::quiet_NaN()
                      : magnitude == 0x7C ? std::numeric_limits<float>::infinity()
                                          : decode_magnitude(magnitude, kE5M2);
  return code & 0x80 ? -value : value;
}

float decode_f16(uint16_t code) {
  const int exponent = code >> 10 & 0x1F;
  const int fraction = code & 0x3FF;
  float value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<float>::infinity()
                          : std::numeric_limits<float>::quiet_NaN();
  } else {
    value = std::ldexp(static_cast<float>(fraction + (exponent == 0 ? 0 : 1024)),
                       std::max(exponent, 1) - 25);
  }
  return code & 0x8000 ? -value : value;
}

uint16_t encode_f16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7E00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7C00;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, -14);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<uint16_t>(steps + ((exponent + 14) << 10));
}

}  // namespace octet::tensor
