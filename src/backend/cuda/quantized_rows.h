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
          .by_block = out.granularity == tensor::Granularity::kRowBlock,
          .pow2 = output.scale_format == tensor::ScaleFormat::kPow2,
          .elements = out.codes.num_elements(),
          .counters = context.counters()};
}

// How kernels that need nothing else of a row share rows of `width` out: `parts` blocks to a row,
// `per_thread` (1, 2 or 4) vectors of eight to a thread. Few rows are spread over many blocks. A
// row with one scale takes one block, or one cluster.
struct RowShares {
  int per_thread, parts;
  LaunchShape launch;
};
inline RowShares shares_of(int64_t rows, int64_t width, bool one_scale, int num_multiprocessors) {
  constexpr int64_t kThreads = 256, kWidestCluster = 8;
  const int64_t vectors = divide_up(width, 8);
  int64_t per_thread = 1, parts = 1;
  if (!one_scale) {
    per_thread = rows * vectors >= 16 * kThreads * num_multiprocessors ? 2 : 1;
    parts = divide_up(vectors, kThreads * per_thread);
  } else if (rows * 4 <= num_multiprocessors && vectors > kThreads / 2) {
    while (parts < kWidestCluster && vectors > parts * kThreads / 2) parts *= 2;
    per_thread = vectors <= parts * kThreads ? 1 : 2;
  } else {
    per_thread = vectors <= kThreads ? 1 : vectors <= 4 * kThreads ? 2 : 4;
  }
  const int64_t threads = round_up(divide_up(vectors, per_thread * parts), 32);
  return {static_cast<int>(per_thread),
          static_cast<int>(parts),
          {.num_blocks = static_cast<unsigned>(rows * parts),
           .block = dim3(static_cast<unsigned>(threads)),
           .cluster = one_scale ? static_cast<unsigned>(parts) : 1}};
}

}  // namespace octet::cuda
