// A QuantizedOutput as the row quantiser takes it, and how its rows are shared out over blocks.
#pragma once

#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_quantizer.cuh"
#include "backend/cuda/launch.cuh"
#include "ops/quantize.h"

namespace octet::cuda {

inline constexpr int64_t kWidestRow = 32768;

// Whether `out` has scales per row, or per row and 128 columns, of [rows, columns], in an aligned
// layout.
inline bool can_quantize_rows(const tensor::QuantizedView& out, int64_t rows, int64_t columns) {
  using tensor::Granularity;
  return (out.granularity == Granularity::kRow || out.granularity == Granularity::kRowBlock) &&
         columns <= kWidestRow && out.codes.shape == tensor::Shape{rows, columns} &&
         out.codes.row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(out.codes.data) % 8 == 0 &&
         out.scales.shape == tensor::scale_shape(out.granularity, rows, columns) &&
         out.scales.dtype == tensor::DType::kF32 && out.scales.data != nullptr &&
         out.scales.contiguous();
}

// The same of what an op quantises: E4M3, or nothing.
inline bool takes_quantized(const ops::QuantizedOutput& output, int64_t rows, int64_t columns) {
  return output.empty() || (output.out.codes.dtype == tensor::DType::kE4M3 &&
                            can_quantize_rows(output.out, rows, columns));
}

inline QuantizedRows quantized_rows(Context& context, const ops::QuantizedOutput& output) {
  if (output.empty()) return {};
  const tensor::QuantizedView& out = output.out;
  return {.codes = out.codes.as<uint8_t>(),
          .stride = out.codes.row_stride,
          .scales = out.scales.as<float>(),
          .kind = out.granularity == tensor::Granularity::kRow ? RowScales::kPerRow
                                                               : RowScales::kPerBlock,
          .pow2 = output.scale_format == tensor::ScaleFormat::kPow2,
          .elements = out.codes.num_elements(),
          .counters = context.counters()};
}

// How kernels that need nothing else of a row share rows of `width` out: a grid of rows × parts,
// `per_thread` (1, 2 or 4) vectors of eight to a thread. Few rows are spread over many blocks; a
// row with one scale takes one block, or, where that is much work, one cluster.
struct RowShares {
  int per_thread;
  LaunchShape launch;
};
inline RowShares shares_of(const Context& context, int64_t rows, int64_t width, bool one_scale) {
  const int num_multiprocessors = context.num_multiprocessors();
  const int64_t vectors = divide_up(width, 8);
  const bool many = rows >= 8 * num_multiprocessors;
  int64_t parts = 1, per_thread = 1;
  if (!one_scale) {
    per_thread = many ? 4 : 1;
    parts = divide_up(vectors, many ? 512 : 256);
  } else if (vectors > 1024 && rows <= num_multiprocessors && !context.portable()) {
    parts = rows * 4 <= num_multiprocessors ? 8 : rows * 2 <= num_multiprocessors ? 4 : 2;
    per_thread = vectors <= 256 * parts ? 1 : 2;
  } else {
    per_thread = many || vectors > 2048 ? 4 : vectors <= 512 ? 1 : 2;
  }
  return {
      static_cast<int>(per_thread),
      {.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(parts)),
       .num_threads = static_cast<unsigned>(round_up(divide_up(vectors, per_thread * parts), 32)),
       .clustered = one_scale && parts > 1}};
}

}  // namespace octet::cuda
