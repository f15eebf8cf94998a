#include "backend/cuda/checks.h"
#include "backend/cuda/row_stats.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kVectors = kSegmentColumns / (4 * kSegmentThreads);

__device__ float sum4(const float (&v)[4]) { return (v[0] + v[1]) + (v[2] + v[3]); }

// A block takes one segment of one row and keeps it in registers; what lies beyond the known ids
// counts as −∞.
template <bool kWeighted>
__global__ void __launch_bounds__(kSegmentThreads)
    segments_kernel(const float* logits, int64_t stride, int64_t num_known,
                    RowTemperatures temperatures, SegmentStats* stats, int count) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(count);
  const int begin = static_cast<int>(blockIdx.x % static_cast<unsigned>(count)) * kSegmentColumns;
  const float* from = logits + row * stride + begin;
  const int width = static_cast<int>(min(num_known - begin, int64_t{kSegmentColumns}));
  const bool vectors = reinterpret_cast<uintptr_t>(from) % 16 == 0;
  const float temperature = temperatures.at(row);
  float z[kVectors][4], largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = 4 * (k * kSegmentThreads + static_cast<int>(threadIdx.x));
    if (vectors && i + 4 <= width) {
      const float4 part = *reinterpret_cast<const float4*>(from + i);
      z[k][0] = part.x, z[k][1] = part.y, z[k][2] = part.z, z[k][3] = part.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) z[k][j] = i + j < width ? from[i + j] : -INFINITY;
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (const float logit : z[k]) largest = fmaxf(largest, logit);
  }
  largest = block_max(largest);
  const float reference = segment_reference(largest, temperature);
  if (temperature != 1.0f) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (float& value : z[k]) value = __fdiv_rn(value, temperature);
    }
  }
  // Four at a time in F32, which loses little, then F64.
  double sum = 0, weighted = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float e[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) e[j] = expf(z[k][j] - reference);
    sum += double{sum4(e)};
    if constexpr (kWeighted) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // −∞ times 0 counts as 0
        if (e[j] != 0.0f) e[j] *= z[k][j] - reference;
      }
      weighted += double{sum4(e)};
    }
  }
  sum = block_sum(sum);
  if constexpr (kWeighted) weighted = block_sum(weighted);
  if (threadIdx.x == 0) stats[blockIdx.x] = {largest, sum, weighted};
}

}  // namespace

Segments segment_stats(Context& context, const tensor::TensorView& logits, int64_t num_known,
                       const RowTemperatures& temperatures, bool weighted) {
  const int64_t rows = logits.shape[0], count = divide_up(num_known, kSegmentColumns);
  auto* stats = context.scratch<SegmentStats>(kScratchSums, rows * count);
  const auto kernel = weighted ? segments_kernel<true> : segments_kernel<false>;
  kernel<<<static_cast<unsigned>(rows * count), kSegmentThreads, 0, context.stream()>>>(
      logits.as<float>(), logits.row_stride, num_known, temperatures, stats,
      static_cast<int>(count));
  check_launch("row statistics");
  return {stats, static_cast<int>(count)};
}

}  // namespace octet::cuda
