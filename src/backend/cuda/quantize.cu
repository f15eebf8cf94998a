// The quantiser and its inverse; byte for byte the definition in ops/quantize.h.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/quantizer.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/quantized_rows.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;
using tensor::TensorView;

constexpr int kThreads = 256;

// What the quantiser sees: BF16 values, or F32 rounded to BF16, times a column scale.
struct Source {
  FloatArray x;
  int64_t stride;
  const float* column_scale;  // or null
  int64_t rows, columns;

  __device__ float at(int64_t row, int64_t column) const {
    float value = x.get(row * stride + column);
    if (!x.is_bf16) value = round_to_bf16(value);
    return column_scale == nullptr || isnan(value) ? value : value * column_scale[column];
  }
};

struct Target {
  uint8_t* codes;
  int64_t stride;
  float* scales;
  bool pow2;
};

// BF16 rows in registers: `parts` neighbouring blocks take a row, a thread kVectors times eight
// elements of it.
template <bool kE5M2, int kVectors>
__global__ void __launch_bounds__(1024)
    vectors_kernel(const Bf16* x, int64_t stride, int width, int parts, QuantizedRows to) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(parts);
  const int part = static_cast<int>(blockIdx.x) % parts;
  const int step = 8 * static_cast<int>(blockDim.x);
  const int first = part * kVectors * step + 8 * static_cast<int>(threadIdx.x);
  uint4 pairs[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    pairs[v] = make_uint4(0, 0, 0, 0);
    if (column < width) pairs[v] = load8(x + row * stride + column);
  }
  quantize_row<kE5M2, true>(pairs, row, first, width, to);
}

// One scale per row: a block each.
template <bool kE5M2>
__global__ void rows_kernel(Source source, Target target, DeviceCounters* counters) {
  const int64_t row = blockIdx.x;
  float amax = 0;
  for (int64_t i = threadIdx.x; i < source.columns; i += kThreads) {
    amax = fmaxf(amax, finite_magnitude(source.at(row, i)));
  }
  const float scale = scale_of<kE5M2>(block_max(amax), target.pow2);
  if (threadIdx.x == 0) target.scales[row] = scale;
  CodeCounts counts;
  for (int64_t i = threadIdx.x; i < source.columns; i += kThreads) {
    target.codes[row * target.stride + i] = counts.encode<kE5M2>(source.at(row, i), scale);
  }
  counts.add_to(counters);
}

// One scale per row and 128 columns: a warp each, four columns to a lane.
template <bool kE5M2>
__global__ void row_blocks_kernel(Source source, Target target, int64_t groups,
                                  DeviceCounters* counters) {
  const int64_t index = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  CodeCounts counts;
  if (index < source.rows * groups) {
    const int64_t row = index / groups, begin = index % groups * kScaleBlock;
    const int lane = threadIdx.x % 32;
    float values[4], amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = begin + 4 * lane + i;
      values[i] = column < source.columns ? source.at(row, column) : 0.0f;
      amax = fmaxf(amax, finite_magnitude(values[i]));
    }
    const float scale = scale_of<kE5M2>(warp_reduce(amax, Max()), target.pow2);
    if (lane == 0) target.scales[index] = scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = begin + 4 * lane + i;
      if (column < source.columns) {
        target.codes[row * target.stride + column] = counts.encode<kE5M2>(values[i], scale);
      }
    }
  }
  counts.add_to(counters);
}

// One scale per 128×128: a block each.
template <bool kE5M2>
__global__ void blocks_kernel(Source source, Target target, DeviceCounters* counters) {
  const int64_t first_row = int64_t{blockIdx.y} * kScaleBlock;
  const int64_t column = int64_t{blockIdx.x} * kScaleBlock + threadIdx.x % kScaleBlock;
  const int64_t last_row = min(first_row + kScaleBlock, source.rows);
  const int64_t step = kThreads / kScaleBlock, lane_row = first_row + threadIdx.x / kScaleBlock;
  float amax = 0;
  if (column < source.columns) {
    for (int64_t row = lane_row; row < last_row; row += step) {
      amax = fmaxf(amax, finite_magnitude(source.at(row, column)));
    }
  }
  const float scale = scale_of<kE5M2>(block_max(amax), target.pow2);
  if (threadIdx.x == 0) target.scales[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = scale;
  CodeCounts counts;
  if (column < source.columns) {
    for (int64_t row = lane_row; row < last_row; row += step) {
      target.codes[row * target.stride + column] =
          counts.encode<kE5M2>(source.at(row, column), scale);
    }
  }
  counts.add_to(counters);
}

// One scale for all: the largest magnitude, as bits, then the codes.
__global__ void amax_kernel(Source source, unsigned* amax_bits) {
  float amax = 0;
  for (int64_t row = blockIdx.x; row < source.rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < source.columns; i += kThreads) {
      amax = fmaxf(amax, finite_magnitude(source.at(row, i)));
    }
  }
  amax = block_max(amax);
  if (threadIdx.x == 0) atomicMax(amax_bits, __float_as_uint(amax));
}
template <bool kE5M2>
__global__ void tensor_kernel(Source source, Target target, const unsigned* amax_bits,
                              DeviceCounters* counters) {
  const float scale = scale_of<kE5M2>(__uint_as_float(*amax_bits), target.pow2);
  if (blockIdx.x == 0 && threadIdx.x == 0) *target.scales = scale;
  CodeCounts counts;
  for (int64_t row = blockIdx.x; row < source.rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < source.columns; i += kThreads) {
      target.codes[row * target.stride + i] = counts.encode<kE5M2>(source.at(row, i), scale);
    }
  }
  counts.add_to(counters);
}

struct ScaleLayout {
  const float* scales;
  Granularity granularity;
  int64_t groups;  // of columns
  __device__ float at(int64_t row, int64_t column) const {
    switch (granularity) {
      case Granularity::kTensor:
        return scales[0];
      case Granularity::kRow:
        return scales[row];
      case Granularity::kBlock:
        return scales[row / kScaleBlock * groups + column / kScaleBlock];
      default:
        return scales[row * groups + column / kScaleBlock];
    }
  }
};

template <bool kE5M2>
__global__ void dequantize_kernel(const uint8_t* codes, int64_t stride, ScaleLayout scales,
                                  FloatArray out, int64_t out_stride, int64_t columns,
                                  int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / columns, column = i % columns;
    out.set(row * out_stride + column,
            decode_fp8<kE5M2>(codes[row * stride + column]) * scales.at(row, column));
  }
}

template <bool kE5M2>
void launch_vectors(Context& context, const TensorView& x, const QuantizedRows& to) {
  const int64_t rows = x.shape[0], columns = x.shape[1];
  const RowShares shares = shares_of(rows, columns, !to.by_block, context.num_multiprocessors());
  const auto kernel = shares.per_thread == 1   ? vectors_kernel<kE5M2, 1>
                      : shares.per_thread == 2 ? vectors_kernel<kE5M2, 2>
                                               : vectors_kernel<kE5M2, 4>;
  launch("quantize", context.stream(), shares.launch, kernel,
         static_cast<const Bf16*>(x.as<Bf16>()), x.row_stride, static_cast<int>(columns),
         shares.parts, to);
}

template <bool kE5M2>
void launch_general(Context& context, const Source& source, const Target& target,
                    Granularity granularity) {
  const cudaStream_t stream = context.stream();
  DeviceCounters* counters = context.counters();
  const auto rows = static_cast<unsigned>(source.rows);
  const int64_t groups = divide_up(source.columns, kScaleBlock);
  switch (granularity) {
    case Granularity::kRow:
      rows_kernel<kE5M2><<<rows, kThreads, 0, stream>>>(source, target, counters);
      break;
    case Granularity::kRowBlock:
      row_blocks_kernel<kE5M2>
          <<<static_cast<unsigned>(divide_up(source.rows * groups, kThreads / 32)), kThreads, 0,
             stream>>>(source, target, groups, counters);
      break;
    case Granularity::kBlock:
      blocks_kernel<kE5M2><<<dim3(static_cast<unsigned>(groups),
                                  static_cast<unsigned>(divide_up(source.rows, kScaleBlock))),
                             kThreads, 0, stream>>>(source, target, counters);
      break;
    case Granularity::kTensor: {
      auto* amax = context.scratch<unsigned>(kScratchSums, 1);
      check(cudaMemsetAsync(amax, 0, sizeof(unsigned), stream), "quantize");
      const unsigned blocks = std::min(rows, 1024u);
      amax_kernel<<<blocks, kThreads, 0, stream>>>(source, amax);
      tensor_kernel<kE5M2><<<blocks, kThreads, 0, stream>>>(source, target, amax, counters);
      break;
    }
  }
  check_launch("quantize");
}

}  // namespace

void quantize(Context& context, const ops::QuantizeArgs& args) {
  constexpr std::string_view kOp = "quantize";
  require_codes(kOp, "out", args.out);
  require_float(kOp, "x", args.x);
  require_shape(kOp, "x", args.x, args.out.codes.shape);
  const int64_t rows = args.x.shape[0], columns = args.x.shape[1];
  if (!args.column_scale.empty()) {
    require_vector(kOp, "column_scale", args.column_scale, DType::kF32, columns);
  }
  if (rows * columns == 0) return;
  const bool is_e5m2 = args.out.codes.dtype == DType::kE5M2;
  if (args.column_scale.empty() && args.x.dtype == DType::kBF16 &&
      takes_vectors(args.x, columns, 8) && can_quantize_rows(args.out, rows, columns)) {
    const QuantizedRows to = quantized_rows(context, {args.out, args.scale_format});
    is_e5m2 ? launch_vectors<true>(context, args.x, to)
            : launch_vectors<false>(context, args.x, to);
    return;
  }
  const Source source{{args.x.data, args.x.dtype == DType::kBF16},
                      args.x.row_stride,
                      args.column_scale.as<float>(),
                      rows,
                      columns};
  const Target target{args.out.codes.as<uint8_t>(), args.out.codes.row_stride,
                      args.out.scales.as<float>(), args.scale_format == tensor::ScaleFormat::kPow2};
  if (is_e5m2) {
    launch_general<true>(context, source, target, args.out.granularity);
  } else {
    launch_general<false>(context, source, target, args.out.granularity);
  }
}

void dequantize(Context& context, const ops::DequantizeArgs& args) {
  constexpr std::string_view kOp = "dequantize";
  require_codes(kOp, "x", args.x);
  require_float(kOp, "out", args.out);
  require_shape(kOp, "out", args.out, args.x.codes.shape);
  const int64_t columns = args.x.columns(), count = args.out.num_elements();
  if (count == 0) return;
  const ScaleLayout scales{args.x.scales.as<float>(), args.x.granularity,
                           divide_up(columns, kScaleBlock)};
  const auto kernel =
      args.x.codes.dtype == DType::kE5M2 ? dequantize_kernel<true> : dequantize_kernel<false>;
  kernel<<<static_cast<unsigned>(std::min<int64_t>(divide_up(count, kThreads), 16384)), kThreads, 0,
           context.stream()>>>(args.x.codes.as<uint8_t>(), args.x.codes.row_stride, scales,
                               {args.out.data, args.out.dtype == DType::kBF16}, args.out.row_stride,
                               columns, count);
  check_launch(kOp);
}

}  // namespace octet::cuda
