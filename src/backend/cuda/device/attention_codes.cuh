// What fixes a row's bytes in Hopper's attention over E4M3 pages: both products run on the matrix
// unit's FP8 path, the queries and the softmax weights as a sum of two E4M3 terms each, so that no
// code of a page is ever converted. Chunks of 256 keys, each by itself, folded in order into the
// row (fold_of, fold, share_of of attention_tile.cuh).
//
//   x = q × 2^query_power; high = x cut to four significant bits, low = x − high (exact for BF16)
//   s = (low · k + high · k) × key scale: one chain over the head width by steps of 32 for the low
//     terms that the high ones go on with
//   m = largest s of the chunk that the row sees; the chunk's maximum is m × factor, with
//     factor = softmax scale × log2 e × 2^−query_power
//   p = 2^(s × factor − m × factor), in one FMA before the exponential, subnormals flushed to zero
//   sums, for r = key % 8: s_r = (T0 + T1) + (T2 + T3), Tw = ((P0 + P1) + P2) + P3,
//     Pb = p[64 b + 16 w + r] + p[64 b + 16 w + 8 + r]; the chunk's as attention_tile.cuh says
//   power = value_power(largest value scale of the chunk that the row sees)
//   w = p × (value scale × 2^−power); high and low of w as of x, E4M3 by round to nearest even
//     (what lies below E4M3's subnormals is dropped)
//   value = ((low · v + high · v of keys 0 … 127) + (the same of 128 … 255)) × 2^power: each one
//     chain of steps of 32 keys, in the order of the page's blocks, for the low terms that the high
//     ones go on with. The unit's accumulator keeps 13 bits after the largest addend's first, hence
//     no longer chains: 128 terms of a size, as in the products of FP8 weights
//   a key that the row does not see has p = 0 and w = 0, whatever its scales; a step whose weights
//     are all zero may be left out
#pragma once

#include <cstdint>

#include "backend/cuda/device/mma.cuh"
#include "ops/attention.h"

namespace octet::cuda {

// The thread's index in its warpgroup, to the compiler another one each time: a loop's turns make
// anew what follows from it, which costs less than the registers that would keep all of it.
__device__ inline int warpgroup_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread % 128);
}

// The power with which 2^power brings a query's largest magnitude to [2^7, 2^8), of E4M3's 448.
__device__ inline int query_power(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return amax == 0 ? 0 : max(-100, min(100, 7 - exponent));
}
// The power of a chunk's largest value scale, which 2^-power brings to [2^7, 2^8).
__device__ inline int value_power(float largest) { return -query_power(largest); }

// The bytes, in their places, of a block's tokens before token `count`.
__device__ inline void first_tokens(int count, uint32_t (&mask)[4]) {
#pragma unroll
  for (uint32_t& word : mask) word = 0;
#pragma unroll
  for (int token = 0; token < static_cast<int>(ops::kValueBlock); ++token) {
    const int place = static_cast<int>(ops::value_place(token));
    if (token < count) mask[place / 4] |= 0xFFu << 8 * (place % 4);
  }
}

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

// Codes of the terms of eight neighbouring elements of a query, BF16 in pairs, times `up`, a power
// of two.
struct QueryTerms {
  uint32_t high[2], low[2];
};
__device__ inline QueryTerms query_terms(const uint32_t (&pairs)[4], float up) {
  const auto terms_of = [up](uint32_t pair) {
    return e4m3_terms(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xFFFF0000u) * up);
  };
  QueryTerms terms;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TermPairs first = terms_of(pairs[2 * i]), second = terms_of(pairs[2 * i + 1]);
    terms.high[i] = first.high | second.high << 16;
    terms.low[i] = first.low | second.low << 16;
  }
  return terms;
}

}  // namespace octet::cuda
