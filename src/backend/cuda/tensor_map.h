// Descriptions of memory for the tensor memory accelerator (device/bulk_copy.cuh).
#pragma once

#include <cstdint>
#include <cuda.h>

namespace octet::cuda {

// A matrix of `rows` rows of `row_bytes`, one behind the other from a multiple of 16 on, in boxes
// of `box_rows` rows and `box_bytes` (64 or 128), which is how they are swizzled too. An Error
// where the driver cannot.
CUtensorMap make_tensor_map(const void* data, int64_t row_bytes, int64_t rows, int box_bytes,
                            int box_rows);

}  // namespace octet::cuda
