#include "backend/cuda/checks.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/row_stats.h"

namespace octet::cuda {
namespace {

using tensor::TensorView;

struct OneTemperature {
  float value;
  __device__ float temperature(int64_t) const { return value; }
};

constexpr int kVectors = kSegmentColumns / (4 * kSegmentThreads);

__device__ float sum4(const float (&v)[4]) { return (v[0] + v[1]) + (v[2] + v[3]); }

// A block takes one segment of one row and keeps it in registers; what lies beyond the known ids
// counts as −∞.
template <bool kWeighted, class Rules>
__global__ void __launch_bounds__(kSegmentThreads)
    segments_kernel(const float* logits, int64_t stride, int64_t num_known,
                    const __grid_constant__ Rules rules, SegmentStats* stats, int count) {
  await_predecessor();
  const int64_t row = blockIdx.x / static_cast<unsigned>(count);
  const int begin = static_cast<int>(blockIdx.x % static_cast<unsigned>(count)) * kSegmentColumns;
  const float* from = logits + row * stride + begin;
  const int width = static_cast<int>(min(num_known - begin, int64_t{kSegmentColumns}));
  const bool vectors = is_vector_aligned(from);
  const float temperature = rules.temperature(row);
  float z[kVectors][4], largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    load_logits(from, 4 * (k * kSegmentThreads + static_cast<int>(threadIdx.x)), width, vectors,
                z[k]);
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

template <bool kWeighted, class Rules>
Segments queue(Context& context, const TensorView& logits, int64_t num_known, const Rules& rules) {
  const int64_t rows = logits.shape[0], count = divide_up(num_known, kSegmentColumns);
  auto* stats = context.scratch<SegmentStats>(kScratchSums, rows * count);
  launch("row statistics", context, {dim3(static_cast<unsigned>(rows * count)), kSegmentThreads},
         segments_kernel<kWeighted, Rules>, static_cast<const float*>(logits.as<float>()),
         logits.row_stride, num_known, rules, stats, static_cast<int>(count));
  return {stats, static_cast<int>(count)};
}

}  // namespace

Segments segment_stats(Context& context, const TensorView& logits, int64_t num_known,
                       float temperature, bool weighted) {
  const OneTemperature rules{temperature};
  return weighted ? queue<true>(context, logits, num_known, rules)
                  : queue<false>(context, logits, num_known, rules);
}

Segments segment_stats(Context& context, const TensorView& logits, int64_t num_known,
                       const DrawRules& rules) {
  return queue<false>(context, logits, num_known, rules);
}

}  // namespace octet::cuda
