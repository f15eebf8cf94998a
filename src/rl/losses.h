// Losses of one optimiser update with their gradients by the log-probabilities.
//
// An update works on a mini-batch of completions that may be cut into micro-batches. The normaliser
// is counted over the whole mini-batch (of all ranks) first; the loss contributions, gradients and
// metrics of its micro-batches then add up to those of the whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "rl/log_ratio_histogram.h"
#include "rl/metric_list.h"

namespace octet::rl {

// With the per-token loss l = −min(rA, clip(r, low, high)A) + β·KL, over the tokens the masks keep:
//   kGrpo    mean over each completion's tokens, then over the completions that have any
//   kBnpo    mean over all tokens of the mini-batch
//   kDapo    the same (here the mini-batch is the global batch)
//   kDrGrpo  sum over tokens / (completions × max_completion_length); every completion counts
enum class LossType { kGrpo, kBnpo, kDapo, kDrGrpo };

// x = log π − log π_ref: k1 = x, k2 = x²/2, k3 = e^−x + x − 1 (Schulman, "Approximating KL
// divergence").
enum class KlEstimator { kK1, kK2, kK3 };

// "grpo", "bnpo", "dapo", "dr_grpo"; throws UsageError naming `where` and the nearest otherwise.
LossType parse_loss_type(std::string_view name, std::string_view where);

// Bounds of the ratio itself: 1 − ε and 1 + ε_high, or what Calibrated Clipping found.
struct ClipBounds {
  double low = 0.8;
  double high = 1.2;
  static ClipBounds from_epsilon(double epsilon, double epsilon_high) {
    return {1.0 - epsilon, 1.0 + epsilon_high};
  }
};

struct LossConfig {
  LossType type = LossType::kGrpo;
  ClipBounds clip;
  double beta = 0;  // weight of the KL term
  KlEstimator kl_estimator = KlEstimator::kK3;
  int64_t max_completion_length = 0;  // > 0 for kDrGrpo
};

// One completion of T tokens; all memory is borrowed. An empty optional span stands for what its
// line says.
struct CompletionTerms {
  std::span<const float> log_probs;       // [T] log π_θ
  std::span<const float> old_log_probs;   // [T] log π_old; unused by the SFT loss
  std::span<const float> ref_log_probs;   // [T] log π_ref; needed where beta ≠ 0, else unused
  std::span<const uint8_t> mask;          // [T] 0: leave the token out; empty: all count
  std::span<const float> policy_weights;  // [T] detached factors of the policy term; empty: all 1
  double advantage = 0;
  // [T] out: d loss / d log_probs, exactly 0 where masked; empty: not wanted.
  std::span<float> gradient;
};

// What the losses divide by; counted over the whole mini-batch, added over ranks.
struct LossNormalizer {
  int64_t num_tokens = 0;                // left by the masks
  int64_t num_completions = 0;           // all
  int64_t num_nonempty_completions = 0;  // with at least one token left

  // A completion of `num_tokens` tokens; an empty mask keeps them all.
  void add(size_t num_tokens, std::span<const uint8_t> mask);
  void add(std::span<const CompletionTerms> completions);
  void add(const LossNormalizer& other);
  // No token left: the loss is 0 and the update is to be skipped and counted.
  bool skipped() const { return num_tokens == 0; }
};

// Sums that add over micro-batches, mini-batches and ranks.
struct LossMetrics {
  double policy_loss = 0;  // contributions without the KL term
  int64_t num_tokens = 0;
  int64_t num_negative_tokens = 0;  // A < 0
  int64_t num_positive_tokens = 0;  // A > 0
  int64_t num_low_clipped = 0;      // A < 0 and r < low: the gradient is cut
  int64_t num_high_clipped = 0;     // A > 0 and r > high
  int64_t num_kl_tokens = 0;        // 0 where beta = 0
  double kl_sum = 0;
  double ratio_sum = 0;
  double ratio_min = std::numeric_limits<double>::infinity();
  double ratio_max = 0;
  int64_t num_outliers = 0;  // |log r| > 2, beyond the histogram
  LogRatioHistogram log_ratios;

  void add(const LossMetrics& other);
  // `loss/policy`, the mean over the `num_updates` optimiser updates that were added;
  // `clip_ratio/{low_mean,high_mean,region_mean}` over all tokens as TRL has them;
  // `clip_ratio/low_negative` (share of the tokens with A < 0), `clip_ratio/high_positive` (of
  // those with A > 0); `kl`; `ratio/{mean,min,max,p01,p50,p99,outliers}`.
  MetricList metrics(int64_t num_updates = 1) const;
};

// The contribution of these completions to the loss of the mini-batch that `normalizer` counted.
// Writes the gradients and adds to `metrics` (may be null). Log-ratios are clamped to ±20 (beyond
// it the gradient is 0); masked values are never read. Sums are in float64, in the order given.
// Throws where lengths disagree or a needed span is missing.
double policy_loss(const LossConfig& config, const LossNormalizer& normalizer,
                   std::span<const CompletionTerms> completions, LossMetrics* metrics);

// Cross-entropy: −log π_θ, mean over the tokens left of the whole mini-batch. Counts only
// `num_tokens` and `policy_loss` in `metrics`.
double sft_loss(const LossNormalizer& normalizer, std::span<const CompletionTerms> completions,
                LossMetrics* metrics);

}  // namespace octet::rl
