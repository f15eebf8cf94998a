#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/quantizer.cuh"
#include "backend/cuda/status.h"
#include "backend/cuda/transpose.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::kScaleBlock;
using tensor::TensorView;

constexpr int kThreads = 256;
constexpr int kTile = 32;

template <class T>
__global__ void pad_kernel(const T* from, int64_t stride, T* to, int64_t columns, int64_t padded,
                           int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / padded, column = i % padded;
    to[i] = column < columns ? from[row * stride + column] : T(0);
  }
}

template <class T>
struct PlainReader {
  using Element = T;
  const T* data;
  int64_t stride;
  __device__ T at(int64_t row, int64_t column) const { return data[row * stride + column]; }
};

template <bool kE5M2>
struct DecodingReader {
  using Element = uint16_t;
  const uint8_t* data;
  int64_t stride;
  const float* scales;
  Granularity granularity;
  int64_t groups;
  __device__ uint16_t at(int64_t row, int64_t column) const {
    const int64_t index = granularity == Granularity::kTensor ? 0
                          : granularity == Granularity::kRow
                              ? row
                              : row / kScaleBlock * groups + column / kScaleBlock;
    const float value = decode_fp8<kE5M2>(data[row * stride + column]) * scales[index];
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

template <class Reader>
__global__ void transpose_kernel(Reader reader, int64_t rows, int64_t columns,
                                 typename Reader::Element* to, int64_t padded, int64_t first,
                                 int64_t last) {
  __shared__ typename Reader::Element tile[kTile][kTile + 1];
  const int64_t row0 = int64_t{blockIdx.y} * kTile, column0 = int64_t{blockIdx.x} * kTile;
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t row = row0 + i, column = column0 + threadIdx.x;
    if (row < rows && column < columns) tile[i][threadIdx.x] = reader.at(row, column);
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t column = column0 + i, row = row0 + threadIdx.x;
    if (column >= columns || first + row >= last) continue;
    to[column * padded + first + row] = row < rows ? tile[threadIdx.x][i] : 0;
  }
}

template <class Reader>
void launch_transpose(Context& context, const Reader& reader, int64_t rows, int64_t columns,
                      void* to, int64_t padded, int64_t first, bool zero_tail) {
  const int64_t last = zero_tail ? padded : first + rows;
  if (columns == 0 || last <= first) return;
  const dim3 grid(static_cast<unsigned>(divide_up(columns, kTile)),
                  static_cast<unsigned>(divide_up(last - first, kTile)));
  transpose_kernel<<<grid, dim3(kTile, 8), 0, context.stream()>>>(
      reader, rows, columns, static_cast<typename Reader::Element*>(to), padded, first, last);
  check_launch("transpose");
}

// A warp takes 32 columns of one group: lane = column, so reads are coalesced.
template <bool kE5M2>
__global__ void quantize_transposed_kernel(FloatArray x, int64_t stride, int64_t columns,
                                           TokenGroups groups, bool pow2, uint8_t* codes,
                                           float* scales, DeviceCounters* counters) {
  __shared__ __align__(4) uint8_t tile[kTile][kScaleBlock + 4];
  const int64_t group = blockIdx.y, column = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int64_t first = groups.first[group], length = groups.length[group];
  CodeCounts counts;
  if (column < columns) {
    float amax = 0;
    for (int64_t t = 0; t < length; ++t) {
      amax = fmaxf(amax, finite_magnitude(round_to_bf16(x.get((first + t) * stride + column))));
    }
    const float scale = scale_of<kE5M2>(amax, pow2);
    scales[column * groups.count + group] = scale;
    for (int64_t t = 0; t < kScaleBlock; ++t) {
      tile[threadIdx.x][t] =
          t < length
              ? counts.encode<kE5M2>(round_to_bf16(x.get((first + t) * stride + column)), scale)
              : 0;
    }
  }
  __syncthreads();
  const int64_t padded = groups.count * kScaleBlock;
  for (int i = 0; i < kTile; ++i) {
    const int64_t to = int64_t{blockIdx.x} * kTile + i;
    if (to >= columns) break;
    const auto words = *reinterpret_cast<const uint32_t*>(&tile[i][4 * threadIdx.x]);
    *reinterpret_cast<uint32_t*>(codes + to * padded + group * kScaleBlock + 4 * threadIdx.x) =
        words;
  }
  counts.add_to(counters);
}

__global__ void finish_kernel(const float* sums, FloatArray y, int64_t stride, int64_t columns,
                              int64_t count, float alpha, bool accumulate) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t at = i / columns * stride + i % columns;
    float value = sums[i] * alpha;
    if (accumulate) value += y.get(at);
    y.set(at, value);
  }
}

__global__ void column_sums_kernel(FloatArray x, int64_t stride, int64_t rows, int64_t columns,
                                   float* sums) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float total = 0;
  for (int64_t begin = 0; begin < rows; begin += kScaleBlock) {
    float partial = 0;
    for (int64_t t = begin; t < min(begin + kScaleBlock, rows); ++t) {
      partial += x.get(t * stride + column);
    }
    total += partial;
  }
  sums[column] += total;
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::clamp<int64_t>(divide_up(count, kThreads), 1, 16384));
}

}  // namespace

void pad_rows(Context& context, const TensorView& from, void* to, int64_t padded) {
  const int64_t columns = from.shape[1], count = from.shape[0] * padded;
  if (tensor::dtype_bytes(from.dtype) == 1) {
    pad_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
        from.as<uint8_t>(), from.row_stride, static_cast<uint8_t*>(to), columns, padded, count);
  } else {
    pad_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
        from.as<uint16_t>(), from.row_stride, static_cast<uint16_t*>(to), columns, padded, count);
  }
  check_launch("pad_rows");
}

void transpose(Context& context, const TensorView& from, void* to, int64_t padded, int64_t first,
               bool zero_tail) {
  const int64_t rows = from.shape[0], columns = from.shape[1];
  if (tensor::dtype_bytes(from.dtype) == 1) {
    launch_transpose(context, PlainReader<uint8_t>{from.as<uint8_t>(), from.row_stride}, rows,
                     columns, to, padded, first, zero_tail);
  } else {
    launch_transpose(context, PlainReader<uint16_t>{from.as<uint16_t>(), from.row_stride}, rows,
                     columns, to, padded, first, zero_tail);
  }
}

void transpose_scales(Context& context, const float* from, int64_t rows, int64_t columns,
                      float* to) {
  launch_transpose(context, PlainReader<float>{from, columns}, rows, columns, to, rows, 0, false);
}

void transpose_decoded(Context& context, const tensor::QuantizedView& from, void* to,
                       int64_t padded, int64_t first, bool zero_tail) {
  const int64_t groups = divide_up(from.columns(), kScaleBlock);
  const auto launch = [&](auto reader) {
    launch_transpose(context, reader, from.rows(), from.columns(), to, padded, first, zero_tail);
  };
  const auto* codes = from.codes.as<uint8_t>();
  const auto* scales = from.scales.as<float>();
  if (from.codes.dtype == DType::kE5M2) {
    launch(DecodingReader<true>{codes, from.codes.row_stride, scales, from.granularity, groups});
  } else {
    launch(DecodingReader<false>{codes, from.codes.row_stride, scales, from.granularity, groups});
  }
}

void quantize_transposed(Context& context, const TensorView& x, const TokenGroups& groups,
                         DType format, tensor::ScaleFormat scale_format, uint8_t* codes,
                         float* scales) {
  const int64_t columns = x.shape[1];
  if (groups.count == 0 || columns == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(columns, kTile)),
                  static_cast<unsigned>(groups.count));
  const auto kernel =
      format == DType::kE5M2 ? quantize_transposed_kernel<true> : quantize_transposed_kernel<false>;
  kernel<<<grid, kTile, 0, context.stream()>>>(
      {x.data, x.dtype == DType::kBF16}, x.row_stride, columns, groups,
      scale_format == tensor::ScaleFormat::kPow2, codes, scales, context.counters());
  check_launch("quantize_transposed");
}

void finish_sums(Context& context, const float* sums, const TensorView& y, float alpha,
                 bool accumulate) {
  const int64_t count = y.num_elements();
  finish_kernel<<<blocks_for(count), kThreads, 0, context.stream()>>>(
      sums, {y.data, y.dtype == DType::kBF16}, y.row_stride, y.shape[1], count, alpha, accumulate);
  check_launch("finish_sums");
}

void add_column_sums(Context& context, const TensorView& x, float* sums) {
  column_sums_kernel<<<static_cast<unsigned>(divide_up(x.shape[1], 64)), 64, 0, context.stream()>>>(
      {x.data, x.dtype == DType::kBF16}, x.row_stride, x.shape[0], x.shape[1], sums);
  check_launch("add_column_sums");
}

}  // namespace octet::cuda
