// The quantiser's parts that the linear products share with `quantize`.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "backend/cpu/codec_kernels.h"
#include "backend/cpu/context.h"
#include "tensor/codec.h"
#include "tensor/tensor.h"

namespace octet::cpu {

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline float largest_finite(tensor::DType format) {
  return format == tensor::DType::kE4M3 ? tensor::kMaxE4M3 : tensor::kMaxE5M2;
}

// The scale of a group whose largest finite magnitude is `amax` (src/ops/quantize.h).
inline float scale_of(float amax, tensor::DType format, tensor::ScaleFormat scale_format) {
  if (amax == 0.0f) return 1.0f;
  const float scale = std::max(amax / largest_finite(format), 0x1p-100f);
  if (scale_format == tensor::ScaleFormat::kF32) return scale;
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x7FFFFFu) & 0x7F800000u);
}

// out[0, count) = columns [begin, begin + count) of row `row`, as F32. x is BF16 or F32.
inline void load_row(const CodecKernels& codec, const tensor::TensorView& x, int64_t row,
                     int64_t begin, int64_t count, float* out) {
  if (x.dtype == tensor::DType::kBF16) {
    codec.bf16_to_f32(x.row<const uint16_t>(row) + begin, count, out);
  } else {
    std::copy_n(x.row<const float>(row) + begin, count, out);
  }
}

// The same, rounded to BF16: what a quantiser reads.
inline void load_row_as_bf16(const CodecKernels& codec, const tensor::TensorView& x, int64_t row,
                             int64_t begin, int64_t count, float* out) {
  if (x.dtype == tensor::DType::kBF16) {
    codec.bf16_to_f32(x.row<const uint16_t>(row) + begin, count, out);
  } else {
    codec.round_to_bf16(x.row<const float>(row) + begin, count, out);
  }
}

// The scale of element (row, column).
inline float scale_at(const tensor::QuantizedView& q, int64_t row, int64_t column) {
  const float* scales = q.scales.as<const float>();
  const int64_t blocks = divide_up(q.columns(), tensor::kScaleBlock);
  switch (q.granularity) {
    case tensor::Granularity::kTensor:
      return scales[0];
    case tensor::Granularity::kRow:
      return scales[row];
    case tensor::Granularity::kBlock:
      return scales[row / tensor::kScaleBlock * blocks + column / tensor::kScaleBlock];
    case tensor::Granularity::kRowBlock:
      return scales[row * blocks + column / tensor::kScaleBlock];
  }
  return 0;
}

// out[0, count) = code × scale of columns [begin, begin + count) of one row.
inline void dequantize_row(const CodecKernels& codec, const tensor::QuantizedView& q, int64_t row,
                           int64_t begin, int64_t count, float* out) {
  codec.decode(q.codes.row<const uint8_t>(row) + begin, count, q.codes.dtype, out);
  for (int64_t done = 0; done < count;) {
    const int64_t column = begin + done;
    const int64_t length =
        std::min(tensor::kScaleBlock - column % tensor::kScaleBlock, count - done);
    codec.multiply_by(out + done, scale_at(q, row, column), length, out + done);
    done += length;
  }
}

// Adds what one range of a parallel loop has counted.
inline void add_counters(ops::QuantizeCounters& total, const ops::QuantizeCounters& part) {
  std::atomic_ref(total.elements).fetch_add(part.elements, std::memory_order_relaxed);
  std::atomic_ref(total.saturated).fetch_add(part.saturated, std::memory_order_relaxed);
  std::atomic_ref(total.underflowed).fetch_add(part.underflowed, std::memory_order_relaxed);
  std::atomic_ref(total.not_a_number).fetch_add(part.not_a_number, std::memory_order_relaxed);
}

// How many iterations of `cost` elementary steps one range of a parallel loop should hold, so that
// a small loop stays on the calling thread.
inline int64_t grain_for(int64_t cost) {
  constexpr int64_t kStepsPerRange = 1 << 16;
  return std::max<int64_t>(1, kStepsPerRange / std::max<int64_t>(1, cost));
}

}  // namespace octet::cpu
