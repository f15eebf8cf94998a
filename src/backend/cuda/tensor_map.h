// What the tensor memory accelerator copies from: a matrix in device memory.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "ops/attention.h"

namespace octet::cuda {

// A matrix of `rows` rows of `row_bytes` (64 or more), `stride_bytes` apart (0: side by side), in
// boxes of `box_rows` rows (at most 256) and at most 128 bytes, which are swizzled as wide as they
// are. False: the driver or the matrix does not allow it.
bool make_tensor_map(CUtensorMap& map, const void* data, int64_t row_bytes, int64_t rows,
                     int64_t stride_bytes = 0, int box_rows = 16);

// Block scales [rows, chunks], `stride` apart, in boxes of 4 chunks. Base and stride are multiples
// of 16 bytes.
bool make_scale_map(CUtensorMap& map, const float* scales, int64_t chunks, int64_t rows,
                    int64_t stride, int box_rows);

// Of all keys of an E4M3 cache; an Error where the driver makes none.
CUtensorMap key_map_of(const ops::KvCacheView& cache);

}  // namespace octet::cuda
