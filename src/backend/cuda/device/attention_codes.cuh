// What fixes a row's bytes in Hopper's attention over E4M3 pages: both products run on the matrix
// unit's FP8 path, the queries and the softmax weights as a sum of two E4M3 terms each, so that no
// code of a page is ever converted. Tiles of 64 keys, each by itself, folded as attention_tile.cuh
// says (tiles in order into chunks of 256, those in order into the row).
//
//   x = q × 2^query_power; high = x cut to four significant bits, low = x − high (exact for BF16)
//   s = (high · k + low · k) × key scale; each product a chain over the head width by steps of 32
//   m = largest s the row sees; p = 2^(s × factor − m × factor), in one FMA before the exponential,
//     0 below 2^−126; factor = softmax scale × log2 e × 2^−query_power; the tile's maximum is
//     m × factor, rounded before the FMA
//   sums of the p whose key % 8 = r: ((p_r + p_8+r) + (p_16+r + p_24+r)) + ((p_32+r + p_40+r) + …)
//   power = value_power(largest value scale the row sees in the tile)
//   w = p × (value scale × 2^−power); high and low of w as of x, E4M3 by round to nearest even
//   value = (high · v + low · v) × 2^power; each product a chain of two steps: keys 0…31, 32…63,
//     within a step in the order of the page's blocks
//   a key that the row does not see has p = 0 and w = 0, whatever its scales
#pragma once

#include <cstdint>

#include "backend/cuda/device/mma.cuh"

namespace octet::cuda {

// The power with which 2^power brings a query's largest magnitude to [2^7, 2^8), of E4M3's 448.
__device__ inline int query_power(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return amax == 0 ? 0 : max(-100, min(100, 7 - exponent));
}
// The power of a tile's largest value scale, which 2^-power brings to [2^7, 2^8).
__device__ inline int value_power(float largest) { return -query_power(largest); }

// Codes of a (the low byte) and b.
__device__ inline uint32_t e4m3_pair(float a, float b) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}
// Codes of the two terms of a (the low bytes) and b. A value that is not finite gives a low term
// that is NaN.
struct TermPairs {
  uint32_t high, low;
};
__device__ inline TermPairs e4m3_terms(float a, float b) {
  const float high_a = __uint_as_float(__float_as_uint(a) & 0xFFF00000u);
  const float high_b = __uint_as_float(__float_as_uint(b) & 0xFFF00000u);
  return {e4m3_pair(high_a, high_b), e4m3_pair(a - high_a, b - high_b)};
}

}  // namespace octet::cuda
