// What the kernels of the own products share: the product, and how its K is cut.
#pragma once

#include "backend/cuda/checks.h"
#include "backend/cuda/product.h"

namespace octet::cuda {

inline constexpr int kChunkBytes = 128;  // of K, one row of a tile in shared memory

// The product in units of bytes and tiles, as kernels read it.
struct Tiles {
  Product p;
  int first_tile[Product::kMaxWeights];    // of a weight, in blocks of rows
  int first_column[Product::kMaxWeights];  // of a weight, in y
  int depth_bytes, num_chunks;
};

// With what depends on no kernel's blocks.
inline Tiles tiles_of(const Product& product) {
  Tiles tiles{};
  tiles.p = product;
  const int64_t element_bytes = product.format == ProductFormat::kBF16 ? 2 : 1;
  tiles.depth_bytes = static_cast<int>(round_up(product.depth * element_bytes, 16));
  tiles.num_chunks = static_cast<int>(divide_up(tiles.depth_bytes, kChunkBytes));
  return tiles;
}

// Cuts each weight into tiles of `rows` rows; their number.
inline int place_tiles(Tiles& tiles, int rows) {
  int count = 0, column = 0;
  for (int i = 0; i < tiles.p.num_weights; ++i) {
    tiles.first_tile[i] = count;
    tiles.first_column[i] = column;
    count += static_cast<int>(divide_up(tiles.p.weights[i].rows, rows));
    column += static_cast<int>(tiles.p.weights[i].rows);
  }
  return count;
}

// The weight that holds the tile of this block's y.
__device__ inline int weight_of_block(const Tiles& tiles) {
  int part = 0;
  while (part + 1 < tiles.p.num_weights &&
         static_cast<int>(blockIdx.y) >= tiles.first_tile[part + 1]) {
    ++part;
  }
  return part;
}

}  // namespace octet::cuda
