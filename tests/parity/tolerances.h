// How far an op may lie from a float64 reference computed from the same (decoded) operands. One
// place for all ops: |actual − expected| ≤ relative × |expected| + absolute × (Σ |terms|), where
// Σ |terms| is the sum of the magnitudes that were added up (1 where an op does not say).
#pragma once

#include <cmath>

#include "tensor/tensor.h"

namespace octet::test {

struct Tolerance {
  double relative;
  double absolute;
};

// Half a unit in the last place of BF16 (2^-8 of the value) and of F32 (2^-24), with a little for
// the result of an F32 sum that lies on a midpoint.
inline constexpr double kRoundingBf16 = 0x1.02p-8;
inline constexpr double kRoundingF32 = 0x1p-23;

// Matrix products accumulate in F32: an error of a few units per 128 terms of each lane or chunk.
inline constexpr double kAccumulationF32 = 1e-5;

inline Tolerance product_tolerance(tensor::DType out) {
  return {out == tensor::DType::kBF16 ? kRoundingBf16 : kRoundingF32, kAccumulationF32};
}

inline bool within(double actual, double expected, Tolerance tolerance, double sum_of_terms = 1) {
  return std::fabs(actual - expected) <=
         tolerance.relative * std::fabs(expected) + tolerance.absolute * sum_of_terms;
}

}  // namespace octet::test
