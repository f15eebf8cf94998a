// What the kernels that draw ids share.
#pragma once

#include "backend/cuda/device/row_stats.cuh"
#include "ops/sampling.h"

namespace octet::cuda {

// Rules of the rows of one launch. They are arguments of the kernels: a copy from the host would
// cost more than the rest.
inline constexpr int kDrawRows = 128;
struct DrawRules {
  ops::SampleParams rows[kDrawRows];
  __device__ float temperature(int64_t row) const {
    return rows[row].temperature == 0 ? 1.0f : rows[row].temperature;
  }
};

struct Draw {
  const float* logits;  // [rows, V]
  int64_t stride;
  int n;                      // known ids
  const SegmentStats* stats;  // [rows, num_segments]
  int num_segments;
  int32_t* ids;                       // [rows]
  float *log_probs, *kept_log_probs;  // [rows], the last may be null
};

// Of the first parameters of a row: whether not all ids are kept.
__host__ __device__ inline bool is_filtered(const ops::SampleParams& params, int64_t n) {
  return params.temperature != 0 &&
         (params.top_p < 1 || params.min_p > 0 || (params.top_k > 0 && params.top_k < n));
}

// Sum of this and the lanes before it.
template <class T>
__device__ T warp_prefix(T value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

}  // namespace octet::cuda
