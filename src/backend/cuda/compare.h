// Comparing results byte for byte.
#pragma once

#include "backend/cuda/context.h"

namespace octet::cuda {

// What two arrays of `rows` rows, `stride_bytes` apart, say in the first `row_bytes` of each
// (multiples of 4): nothing where the first is all zeros. Waits.
enum class Verdict { kEqual, kDifferent, kNothing };
Verdict compare_rows(Context& context, const void* a, const void* b, int64_t rows,
                     int64_t row_bytes, int64_t stride_bytes);

}  // namespace octet::cuda
