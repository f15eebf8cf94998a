#include "backend/cpu/gemm_kernels.h"

#include <algorithm>

#include "backend/cpu/dispatch.h"
#include "tensor/codec.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/gemm_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {

// Rows of a tile: as many accumulators as the registers hold beside the operands.
constexpr int kDotRows = kLanes == 16 ? 6 : 3;
constexpr int kScaledDotRows = kLanes == 4 ? 1 : 3;
constexpr int kOuterRows = kLanes == 4 ? 2 : 6;
constexpr int kOuterVectors = kLanes == 8 ? 2 : 4;

// Asks for the lines of an Ahead, a few after each piece of arithmetic: all at once would stall it.
class Prefetcher {
 public:
  Prefetcher(const Ahead& ahead, int64_t num_pieces)
      : row_(static_cast<const char*>(ahead.data)), ahead_(ahead), rows_left_(ahead.rows) {
    const int64_t lines = ahead.rows * ((ahead.row_bytes + kLine - 1) / kLine);
    lines_per_piece_ = (lines + num_pieces - 1) / num_pieces;
  }
  HWY_INLINE void after_piece() {
    for (int64_t i = 0; i < lines_per_piece_ && rows_left_ > 0; ++i) {
      __builtin_prefetch(row_ + offset_, 0, 2);
      offset_ += kLine;
      if (offset_ >= ahead_.row_bytes) {
        offset_ = 0;
        row_ += ahead_.stride_bytes;
        --rows_left_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  const char* row_;
  const Ahead& ahead_;
  int64_t rows_left_;
  int64_t offset_ = 0;
  int64_t lines_per_piece_;
};

HWY_INLINE int64_t count_tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// sum += products of the k from `begin` to `end`.
template <int kRows>
HWY_INLINE void add_products(FloatVec (&sum)[kRows][kDotColumns], const float* const (&a)[kRows],
                             const float* const (&b)[kDotColumns], int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; k += kLanes) {
    // The fewer of rows and columns are held in registers, the others pass by.
    if constexpr (kRows < kDotColumns) {
      FloatVec u[kRows];
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) u[r] = load_once(a[r] + k);
      OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
        const FloatVec v = load_once(b[j] + k);
        OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
          sum[r][j] = multiply_add(u[r], v, sum[r][j]);
        }
      }
    } else {
      FloatVec v[kDotColumns];
      OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) v[j] = load_once(b[j] + k);
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
        const FloatVec u = load_once(a[r] + k);
        OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
          sum[r][j] = multiply_add(u, v[j], sum[r][j]);
        }
      }
    }
  }
}

template <int kRows, bool kScaled>
HWY_INLINE void dot_tile(const DotBlock& block, int64_t row, int64_t column,
                         Prefetcher& prefetcher) {
  const float* a[kRows];
  FloatVec total[kRows][kDotColumns];
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    a[r] = block.a + (row + r) * block.a_stride;
    OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) total[r][j] = zeros();
  }
  const auto running = [&](int r) {
    return block.running + ((row + r) * block.columns + column) * kLanes;
  };
  if (!block.first) {
    OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
      OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
        total[r][j] = load(running(r) + j * kLanes);
      }
    }
  }
  const float* b[kDotColumns];
  OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) b[j] = block.b + (column + j) * block.b_stride;
  if constexpr (kScaled) {
    const float* b_scale = block.b_scales;
    const float* a_scale = block.a_scales + row * block.a_scale_stride;
    for (int64_t begin = 0; begin < block.depth; begin += tensor::kScaleBlock) {
      FloatVec partial[kRows][kDotColumns];
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
        OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) partial[r][j] = zeros();
      }
      add_products(partial, a, b, begin, std::min(begin + tensor::kScaleBlock, block.depth));
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
        const FloatVec scale = all(a_scale[r * block.a_scale_stride] * *b_scale);
        OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
          total[r][j] = multiply_add(partial[r][j], scale, total[r][j]);
        }
      }
      ++a_scale;
      ++b_scale;
      prefetcher.after_piece();
    }
  } else {
    for (int64_t begin = 0; begin < block.depth; begin += tensor::kScaleBlock) {
      add_products(total, a, b, begin, std::min(begin + tensor::kScaleBlock, block.depth));
      prefetcher.after_piece();
    }
  }
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    if (block.last) {
      store_sums(total[r], block.sums + (row + r) * block.columns + column);
    } else {
      OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
        store(total[r][j], running(r) + j * kLanes);
      }
    }
  }
}

// Tiles of kRows rows; what is left over goes to smaller tiles. All columns of a group of rows in
// turn, so that the rows of `a` stay near.
template <int kRows, bool kScaled>
void dot_rows(const DotBlock& block, int64_t row, Prefetcher& prefetcher) {
  for (; row + kRows <= block.rows; row += kRows) {
    for (int64_t column = 0; column < block.columns; column += kDotColumns) {
      dot_tile<kRows, kScaled>(block, row, column, prefetcher);
    }
  }
  if constexpr (kRows > 1) {
    if (row < block.rows) dot_rows<kRows - 1, kScaled>(block, row, prefetcher);
  }
}

void dot(const DotBlock& block) {
  const bool scaled = block.a_scales != nullptr;
  const int64_t tiles = count_tiles(block.rows, scaled ? kScaledDotRows : kDotRows) *
                        count_tiles(block.columns, kDotColumns);
  Prefetcher prefetcher(block.ahead, tiles * count_tiles(block.depth, tensor::kScaleBlock));
  if (scaled) {
    dot_rows<kScaledDotRows, true>(block, 0, prefetcher);
  } else {
    dot_rows<kDotRows, false>(block, 0, prefetcher);
  }
}

constexpr int64_t kOuterPiece = 16;  // of k

// The part of `out` that the tile after this one adds to.
template <int kRows>
HWY_INLINE void prefetch_next_out(const OuterBlock& block, int64_t row, int64_t column) {
  constexpr int64_t kColumns = kOuterVectors * kLanes;
  row += kRows;
  if (row >= block.rows) {
    row = 0;
    column += kColumns;
  }
  const float* out = block.out + row * block.out_stride + column;
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kColumns; j += 16)
      __builtin_prefetch(out + r * block.out_stride + j, 1);
  }
}

template <int kRows>
HWY_INLINE void outer_tile(const OuterBlock& block, int64_t row, int64_t column,
                           Prefetcher& prefetcher) {
  const float* a = block.a + row * block.a_row;
  const float* b = block.b + column;
  if (block.out != nullptr) prefetch_next_out<kRows>(block, row, column);
  FloatVec sum[kRows][kOuterVectors];
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    OCTET_UNROLL for (int j = 0; j < kOuterVectors; ++j) sum[r][j] = zeros();
  }
  for (int64_t k = 0; k < block.depth;) {
    for (const int64_t end = std::min(k + kOuterPiece, block.depth); k < end; ++k) {
      FloatVec v[kOuterVectors];
      OCTET_UNROLL for (int j = 0; j < kOuterVectors; ++j) v[j] = load(b + j * kLanes);
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
        const FloatVec u = all(a[r * block.a_row]);
        OCTET_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
          sum[r][j] = multiply_add(u, v[j], sum[r][j]);
        }
      }
      a += block.a_column;
      b += block.b_stride;
    }
    prefetcher.after_piece();
  }
  const FloatVec alpha = all(block.alpha);
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    const FloatVec row_scale = all(block.row_scales[(row + r) * block.row_scale_stride]);
    OCTET_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
      const int64_t at = column + j * kLanes;
      float* c = block.c + (row + r) * block.c_stride + at;
      const FloatVec scale = multiply(row_scale, load(block.column_scales + at));
      const FloatVec total = multiply_add(sum[r][j], scale, block.first ? zeros() : load(c));
      if (block.out == nullptr) {
        store(total, c);
      } else {
        float* out = block.out + (row + r) * block.out_stride + at;
        store(add(multiply(total, alpha), load(out)), out);
      }
    }
  }
}

template <int kRows>
void outer_rows(const OuterBlock& block, int64_t row, int64_t column, Prefetcher& prefetcher) {
  for (; row + kRows <= block.rows; row += kRows) outer_tile<kRows>(block, row, column, prefetcher);
  if constexpr (kRows > 1) {
    if (row < block.rows) outer_rows<kRows - 1>(block, row, column, prefetcher);
  }
}

void outer(const OuterBlock& block) {
  constexpr int64_t kColumns = kOuterVectors * kLanes;
  const int64_t tiles = count_tiles(block.rows, kOuterRows) * count_tiles(block.columns, kColumns);
  Prefetcher prefetcher(block.ahead, tiles * count_tiles(block.depth, kOuterPiece));
  for (int64_t column = 0; column < block.columns; column += kColumns) {
    outer_rows<kOuterRows>(block, 0, column, prefetcher);
  }
}

// Plain loops: the compiler makes vectors of them, and neither fuses nor reorders.
void finish(const FinishBlock& block) {
  constexpr int64_t kPiece = 64;
  float values[kPiece];
  for (int64_t row = 0; row < block.rows; ++row) {
    const bool row_scaled = block.row_scales != nullptr;
    const float row_scale = row_scaled ? block.row_scales[row * block.row_scale_stride] : 1.0f;
    for (int64_t begin = 0; begin < block.columns; begin += kPiece) {
      const int64_t count = std::min(kPiece, block.columns - begin);
      const float* sums = block.sums + row * block.sum_stride + begin;
      const float* scales = block.column_scales;
      if (scales == nullptr) {
        for (int64_t i = 0; i < count; ++i) values[i] = sums[i];
      } else if (block.column_scale_stride == 0) {
        for (int64_t i = 0; i < count; ++i) values[i] = sums[i] * scales[0];
      } else {
        for (int64_t i = 0; i < count; ++i) values[i] = sums[i] * scales[begin + i];
      }
      if (row_scaled) {
        for (int64_t i = 0; i < count; ++i) values[i] *= row_scale;
      }
      if (block.alpha != 1.0f) {
        for (int64_t i = 0; i < count; ++i) values[i] *= block.alpha;
      }
      if (block.bias != nullptr) {
        for (int64_t i = 0; i < count; ++i) values[i] += block.bias[begin + i];
      }
      if (block.out_dtype == tensor::DType::kF32) {
        float* out = static_cast<float*>(block.out) + row * block.out_stride + begin;
        if (block.accumulate) {
          for (int64_t i = 0; i < count; ++i) out[i] += values[i];
        } else {
          for (int64_t i = 0; i < count; ++i) out[i] = values[i];
        }
      } else {
        uint16_t* out = static_cast<uint16_t*>(block.out) + row * block.out_stride + begin;
        if (block.accumulate) {
          for (int64_t i = 0; i < count; ++i) values[i] += tensor::decode_bf16(out[i]);
        }
        for (int64_t i = 0; i < count; ++i) out[i] = tensor::encode_bf16(values[i]);
      }
    }
  }
}

constexpr GemmKernels kKernels = {dot, outer, finish};

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {

const GemmKernels& gemm_kernels(Isa isa) { return OCTET_CPU_KERNEL(isa, kKernels); }

}  // namespace octet::cpu
#endif
