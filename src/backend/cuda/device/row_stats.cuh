// The one function behind every log-probability: a block of kRowThreads reads one row of logits.
#pragma once

#include <cmath>

#include "backend/cuda/device/reduce.cuh"

namespace octet::cuda {

inline constexpr int kRowThreads = 512;

// Of z = logits / temperature over the known ids, with e = exp(z − maximum).
struct RowStats {
  float maximum;    // max z
  double sum;       // Σ e
  double weighted;  // Σ e (z − maximum)
};

__device__ inline float distance_of(float logit, float temperature, float maximum) {
  return __fdiv_rn(logit, temperature) - maximum;
}

__device__ inline RowStats row_stats(const float* logits, int64_t n, float temperature) {
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) largest = fmaxf(largest, logits[i]);
  // Division is monotone, so this is the largest quotient.
  RowStats stats{__fdiv_rn(block_max(largest), temperature), 0, 0};
  double sum = 0, weighted = 0;
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
    const float distance = distance_of(logits[i], temperature, stats.maximum);
    const float e = expf(distance);
    sum += double{e};
    if (e != 0.0f) weighted += double{e} * double{distance};  // −∞ times 0 counts as 0
  }
  stats.sum = block_sum(sum);
  stats.weighted = block_sum(weighted);
  return stats;
}

__device__ inline float log_prob_of(const RowStats& stats, float logit, float temperature) {
  return static_cast<float>(double{distance_of(logit, temperature, stats.maximum)} -
                            log(stats.sum));
}

}  // namespace octet::cuda
