// What trying out products needs on the device: operands that tell numeric classes apart, digests
// of rows, and a pause behind which launches queue up.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/context.h"

namespace octet::cuda {

// Signed values over seven powers of two, so that every part of a sum counts and much cancels;
// a pure function of the seed and the place.
void fill_codes(Context& context, uint8_t* codes, int64_t count, uint32_t seed);  // E4M3
void fill_bf16(Context& context, uint16_t* values, int64_t count, uint32_t seed);
// Full mantissas in [0.5, 1.5).
void fill_scales(Context& context, float* scales, int64_t count, uint32_t seed);

// A digest of each of `rows` rows of `row_bytes` (a multiple of 4), `stride_bytes` apart: equal
// rows have equal digests, and others hardly ever. A row of zeros has the digest 0. Waits.
std::vector<uint64_t> digest_rows(Context& context, const void* data, int64_t rows,
                                  int64_t row_bytes, int64_t stride_bytes);

// Stands for a small kernel between products, such as a norm: 2 µs that end where the next begins.
void run_small_kernel(Context& context);

// Keeps the stream busy for so long.
void pause_stream(Context& context, int64_t nanoseconds);

}  // namespace octet::cuda
