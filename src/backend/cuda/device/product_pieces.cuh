// Operands of mma.sync products in shared memory: rows of a chunk of K, 128 bytes, whose 16-byte
// piece c of row r lies at c ^ (r % 8).
#pragma once

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/mma.cuh"
#include "backend/cuda/product_tiles.h"

namespace octet::cuda {

inline constexpr int kChunkSteps = 4;  // of 32 bytes: 32 8-bit or 16 BF16 values

// kRows rows of `data` from `first`, chunk `chunk`, into a tile; zeros beyond the last row and K.
template <int kRows, int kThreads>
__device__ void load_tile(const char* data, int64_t stride_bytes, int64_t first, int64_t num_rows,
                          int chunk, int depth_bytes, uint32_t tile) {
#pragma unroll
  for (int i = 0; i < (kRows * 8 + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * 8 % kThreads != 0 && index >= kRows * 8) break;
    const int row = index / 8, piece = index % 8;
    const int at = chunk * kChunkBytes + piece * 16;
    const bool inside = first + row < num_rows && at < depth_bytes;
    const char* from = inside ? data + (first + row) * stride_bytes + at : data;
    copy_async_16(tile + row * kChunkBytes + ((piece ^ row % 8) << 4), from, inside);
  }
}

// Of a tile's row and piece of this lane, as operands of a matrix product.
__device__ inline void load_pieces(uint32_t tile, int row, int piece, uint32_t (&to)[4]) {
  load_matrices(tile + row * kChunkBytes + ((piece ^ row % 8) << 4), to);
}

}  // namespace octet::cuda
