// What every log-probability comes from: statistics of a row of logits over segments of a fixed
// width, folded in one fixed order. They depend on the row alone, not on its address, its batch or
// which kernel reads it.
#pragma once

#include <cmath>

#include "backend/cuda/device/reduce.cuh"

namespace octet::cuda {

inline constexpr int kSegmentColumns = 4096;
inline constexpr int kSegmentThreads = 256;

// Of z = logits / temperature over a segment's known ids, with e = exp(z − the segment's maximum).
struct SegmentStats {
  float largest;    // logit; −∞: e counts from 0 instead
  double sum;       // Σ e
  double weighted;  // Σ e (z − maximum)
};

// The same of the whole row, with e = exp(z − the row's maximum).
struct RowStats {
  float maximum;  // max z
  double sum;     // NaN where a logit is NaN or +∞, or all are −∞
  double weighted;
  float largest;  // logit
};

__device__ inline float scaled(float logit, float temperature) {
  return temperature == 1.0f ? logit : __fdiv_rn(logit, temperature);
}
__device__ inline float distance_of(float logit, float temperature, float maximum) {
  return scaled(logit, temperature) - maximum;
}

// Four neighbouring logits of a segment from `i` on; what lies beyond its `width` counts as −∞.
// `vectors`: the segment stands at a multiple of 16 bytes.
__device__ inline void load_logits(const float* segment, int i, int width, bool vectors,
                                   float (&to)[4]) {
  if (vectors && i + 4 <= width) {
    const float4 four = *reinterpret_cast<const float4*>(segment + i);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = i + j < width ? segment[i + j] : -INFINITY;
  }
}
__device__ inline bool is_vector_aligned(const float* segment) {
  return reinterpret_cast<uintptr_t>(segment) % 16 == 0;
}

// What z is taken relative to within a segment.
__device__ inline float segment_reference(float largest, float temperature) {
  return largest == -INFINITY ? 0.0f : scaled(largest, temperature);
}

// e of the row for one of the segment: the factor between the two.
__device__ inline double segment_factor(float largest, float temperature, float maximum) {
  return largest == -INFINITY ? 1.0 : exp(double{scaled(largest, temperature)} - double{maximum});
}

// A warp folds a row's segments; all lanes receive the result.
__device__ inline RowStats fold_segments(const SegmentStats* segments, int count,
                                         float temperature) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = -INFINITY;
  for (int i = lane; i < count; i += 32) largest = fmaxf(largest, segments[i].largest);
  largest = warp_reduce(largest, Max());
  // Division is monotone, so this is the largest quotient.
  const float maximum = scaled(largest, temperature);
  double sum = largest == -INFINITY ? NAN : 0.0, weighted = 0;
  for (int i = lane; i < count; i += 32) {
    const SegmentStats s = segments[i];
    const double factor = segment_factor(s.largest, temperature, maximum);
    sum += factor * s.sum;
    if (s.largest != -INFINITY) {
      const double distance = double{scaled(s.largest, temperature)} - double{maximum};
      weighted += factor * (s.weighted + distance * s.sum);
    }
  }
  return {maximum, warp_reduce(sum, Sum()), warp_reduce(weighted, Sum()), largest};
}

__device__ inline float log_prob_of(const RowStats& stats, float logit, float temperature) {
  return static_cast<float>(double{distance_of(logit, temperature, stats.maximum)} -
                            log(stats.sum));
}

}  // namespace octet::cuda
