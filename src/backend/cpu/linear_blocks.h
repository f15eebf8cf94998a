// How the linear products are cut into blocks; none of these numbers changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/codec_kernels.h"
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/quantize_rows.h"
#include "ops/linear.h"

namespace octet::cpu {

constexpr int64_t kRowsPerTask = 96;
constexpr int64_t kTileColumns = 128;
// Columns of the result that a gradient's task covers at most, so that it reads rows in long runs
// and its sums, kRowsPerTask × kStripeColumns × 4 bytes, stay in the second-level cache.
constexpr int64_t kStripeColumns = 1024;
// Rows of F32 scratch are this much longer than their contents, so that neighbours do not fall on
// the same lines of the first-level cache.
constexpr int64_t kRowPadding = 16;

inline int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

// Columns of a task where `other_tasks` tasks cover the rows: narrower where threads would idle.
inline int64_t stripe_columns(int64_t columns, int64_t other_tasks, int num_threads) {
  const int64_t stripes = divide_up(num_threads, std::max<int64_t>(1, other_tasks));
  return std::clamp(round_up(divide_up(columns, stripes), kTileColumns), kTileColumns,
                    kStripeColumns);
}

// How many rows of `row_floats` are held as F32 at a time: a multiple of kRowsPerTask, about 32 MB.
inline int64_t rows_at_a_time(int64_t row_floats) {
  constexpr int64_t kFloats = 8 << 20;
  return std::max<int64_t>(1, kFloats / row_floats / kRowsPerTask) * kRowsPerTask;
}

// out[0, count) = values of columns [begin, begin + count) of a weight's row, codes unscaled.
inline void load_weight(const CodecKernels& codec, const ops::Weight& weight, int64_t row,
                        int64_t begin, int64_t count, float* out) {
  if (weight.is_quantized()) {
    const tensor::TensorView& codes = weight.quantized.codes;
    codec.decode(codes.row<const uint8_t>(row) + begin, count, codes.dtype, out);
  } else {
    load_row(codec, weight.dense, row, begin, count, out);
  }
}

// Where rows [row, row + rows) and columns [begin, begin + count) of a weight lie in memory.
inline Ahead part_of_weight(const ops::Weight& weight, int64_t row, int64_t rows, int64_t begin,
                            int64_t count) {
  const tensor::TensorView& x = weight.is_quantized() ? weight.quantized.codes : weight.dense;
  const int64_t bytes = tensor::dtype_bytes(x.dtype);
  return {static_cast<const char*>(x.data) + (row * x.row_stride + begin) * bytes, rows,
          count * bytes, x.row_stride * bytes};
}

}  // namespace octet::cpu
