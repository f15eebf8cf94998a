#include "rl/losses.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "base/error.h"
#include "base/strings.h"

namespace octet::rl {
namespace {

constexpr double kMaxLogRatio = 20.0;

// A term of the loss and its derivative by log π.
struct Term {
  double value = 0;
  double derivative = 0;
};

bool kept(std::span<const uint8_t> mask, size_t t) { return mask.empty() || mask[t] != 0; }

int64_t count_kept(size_t num_tokens, std::span<const uint8_t> mask) {
  if (mask.empty()) return static_cast<int64_t>(num_tokens);
  return static_cast<int64_t>(mask.size()) - std::count(mask.begin(), mask.end(), uint8_t{0});
}

double clamp_log_ratio(double log_ratio) {
  return std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio);
}

// −min(rA, clip(r)A). A tie keeps the gradient: it is the ratio inside the bounds.
Term policy_term(double log_ratio, double ratio, double advantage, const ClipBounds& clip) {
  const double clipped = std::clamp(ratio, clip.low, clip.high);
  if (ratio * advantage > clipped * advantage) return {-clipped * advantage, 0};
  const double value = -ratio * advantage;
  return {value, std::abs(log_ratio) > kMaxLogRatio ? 0 : value};
}

Term kl_term(KlEstimator estimator, double log_ratio) {
  const double x = clamp_log_ratio(log_ratio);
  Term term;
  switch (estimator) {
    case KlEstimator::kK1:
      term = {x, 1};
      break;
    case KlEstimator::kK2:
      term = {0.5 * x * x, x};
      break;
    case KlEstimator::kK3:
      // expm1 keeps small differences, where e^−x + x − 1 cancels.
      term = {std::expm1(-x) + x, -std::expm1(-x)};
      break;
  }
  if (std::abs(log_ratio) > kMaxLogRatio) term.derivative = 0;
  return term;
}

void check_length(const char* what, size_t length, size_t num_tokens, bool optional) {
  if (length == num_tokens || (optional && length == 0)) return;
  fail("loss", "{} must have one value per token, {}, but has {}", what, num_tokens, length);
}

void check_completion(const CompletionTerms& completion, bool policy, bool kl) {
  const size_t num_tokens = completion.log_probs.size();
  check_length("mask", completion.mask.size(), num_tokens, true);
  check_length("gradient", completion.gradient.size(), num_tokens, true);
  if (policy) check_length("old_log_probs", completion.old_log_probs.size(), num_tokens, false);
  if (kl) check_length("ref_log_probs", completion.ref_log_probs.size(), num_tokens, false);
  check_length("policy_weights", completion.policy_weights.size(), num_tokens, true);
}

void check_normalizer(const LossNormalizer& normalizer, int64_t num_tokens) {
  if (num_tokens <= normalizer.num_tokens) return;
  fail("loss",
       "the normaliser must count the whole mini-batch, but counts {} of at least {} tokens",
       normalizer.num_tokens, num_tokens);
}

// What one token of a completion with `num_tokens` tokens left is multiplied by.
double token_scale(const LossConfig& config, const LossNormalizer& normalizer, int64_t num_tokens) {
  switch (config.type) {
    case LossType::kGrpo:
      return 1.0 / (static_cast<double>(num_tokens) *
                    static_cast<double>(normalizer.num_nonempty_completions));
    case LossType::kBnpo:
    case LossType::kDapo:
      return 1.0 / static_cast<double>(normalizer.num_tokens);
    case LossType::kDrGrpo:
      return 1.0 / (static_cast<double>(normalizer.num_completions) *
                    static_cast<double>(config.max_completion_length));
  }
  OCTET_ASSERT(false);
}

void observe_ratio(LossMetrics& metrics, const ClipBounds& clip, double advantage, double log_ratio,
                   double ratio) {
  ++metrics.num_tokens;
  metrics.num_negative_tokens += advantage < 0;
  metrics.num_positive_tokens += advantage > 0;
  metrics.num_low_clipped += advantage < 0 && ratio < clip.low;
  metrics.num_high_clipped += advantage > 0 && ratio > clip.high;
  metrics.ratio_sum += ratio;
  metrics.ratio_min = std::min(metrics.ratio_min, ratio);
  metrics.ratio_max = std::max(metrics.ratio_max, ratio);
  metrics.num_outliers += !(std::abs(log_ratio) <= -LogRatioHistogram::kLowest);
  if (!std::isnan(log_ratio)) metrics.log_ratios.add(log_ratio);
}

}  // namespace

LossType parse_loss_type(std::string_view name, std::string_view where) {
  static const std::array<std::string, 4> kNames = {"grpo", "bnpo", "dapo", "dr_grpo"};
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found != kNames.end()) return static_cast<LossType>(found - kNames.begin());
  const std::string nearest = nearest_name(name, kNames);
  fail_usage(where, "a loss type is required (grpo, bnpo, dapo, dr_grpo), but \"{}\" is given{}",
             name, nearest.empty() ? "" : "; did you mean \"" + nearest + "\"?");
}

void LossNormalizer::add(size_t num_tokens_in, std::span<const uint8_t> mask) {
  if (!mask.empty()) check_length("mask", mask.size(), num_tokens_in, false);
  const int64_t num_kept = count_kept(num_tokens_in, mask);
  num_tokens += num_kept;
  num_completions += 1;
  num_nonempty_completions += num_kept > 0;
}

void LossNormalizer::add(std::span<const CompletionTerms> completions) {
  for (const CompletionTerms& c : completions) add(c.log_probs.size(), c.mask);
}

void LossNormalizer::add(const LossNormalizer& other) {
  num_tokens += other.num_tokens;
  num_completions += other.num_completions;
  num_nonempty_completions += other.num_nonempty_completions;
}

void LossMetrics::add(const LossMetrics& other) {
  policy_loss += other.policy_loss;
  num_tokens += other.num_tokens;
  num_negative_tokens += other.num_negative_tokens;
  num_positive_tokens += other.num_positive_tokens;
  num_low_clipped += other.num_low_clipped;
  num_high_clipped += other.num_high_clipped;
  num_kl_tokens += other.num_kl_tokens;
  kl_sum += other.kl_sum;
  ratio_sum += other.ratio_sum;
  ratio_min = std::min(ratio_min, other.ratio_min);
  ratio_max = std::max(ratio_max, other.ratio_max);
  num_outliers += other.num_outliers;
  log_ratios.add(other.log_ratios);
}

MetricList LossMetrics::metrics(int64_t num_updates) const {
  MetricList list;
  const auto add_mean = [&](const char* name, double sum, int64_t count) {
    if (count > 0) list.emplace_back(name, sum / static_cast<double>(count));
  };
  const auto add_share = [&](const char* name, int64_t part, int64_t whole) {
    add_mean(name, static_cast<double>(part), whole);
  };
  if (num_tokens > 0) add_mean("loss/policy", policy_loss, num_updates);
  add_mean("kl", kl_sum, num_kl_tokens);
  if (ratio_min > ratio_max) return list;  // no ratio was seen
  add_share("clip_ratio/low_mean", num_low_clipped, num_tokens);
  add_share("clip_ratio/high_mean", num_high_clipped, num_tokens);
  add_share("clip_ratio/region_mean", num_low_clipped + num_high_clipped, num_tokens);
  add_share("clip_ratio/low_negative", num_low_clipped, num_negative_tokens);
  add_share("clip_ratio/high_positive", num_high_clipped, num_positive_tokens);
  add_mean("ratio/mean", ratio_sum, num_tokens);
  list.emplace_back("ratio/min", ratio_min);
  list.emplace_back("ratio/max", ratio_max);
  list.emplace_back("ratio/p01", log_ratios.ratio_quantile(0.01));
  list.emplace_back("ratio/p50", log_ratios.ratio_quantile(0.50));
  list.emplace_back("ratio/p99", log_ratios.ratio_quantile(0.99));
  add_share("ratio/outliers", num_outliers, num_tokens);
  return list;
}

double policy_loss(const LossConfig& config, const LossNormalizer& normalizer,
                   std::span<const CompletionTerms> completions, LossMetrics* metrics) {
  const bool with_kl = config.beta != 0;
  if (config.type == LossType::kDrGrpo && config.max_completion_length <= 0) {
    fail("loss", "dr_grpo needs max_completion_length > 0, but it is {}",
         config.max_completion_length);
  }
  if (!(config.clip.low <= config.clip.high)) {
    fail("loss", "the lower clip bound must not exceed the upper, but they are {} and {}",
         config.clip.low, config.clip.high);
  }
  LossMetrics unused;
  LossMetrics& seen = metrics != nullptr ? *metrics : unused;
  double loss = 0;
  int64_t num_tokens_seen = 0;
  for (const CompletionTerms& c : completions) {
    check_completion(c, true, with_kl);
    std::fill(c.gradient.begin(), c.gradient.end(), 0.0f);
    const int64_t num_kept = count_kept(c.log_probs.size(), c.mask);
    if (num_kept == 0) continue;
    check_normalizer(normalizer, num_tokens_seen += num_kept);
    const double scale = token_scale(config, normalizer, num_kept);

    double policy_sum = 0;
    double kl_sum = 0;
    for (size_t t = 0; t < c.log_probs.size(); ++t) {
      if (!kept(c.mask, t)) continue;
      const double log_prob = c.log_probs[t];
      const double log_ratio = log_prob - static_cast<double>(c.old_log_probs[t]);
      const double ratio = std::exp(clamp_log_ratio(log_ratio));
      observe_ratio(seen, config.clip, c.advantage, log_ratio, ratio);

      Term policy = policy_term(log_ratio, ratio, c.advantage, config.clip);
      if (!c.policy_weights.empty()) {
        const double weight = c.policy_weights[t];
        policy = weight == 0 ? Term{} : Term{policy.value * weight, policy.derivative * weight};
      }
      Term kl;
      if (with_kl) kl = kl_term(config.kl_estimator, log_prob - c.ref_log_probs[t]);
      policy_sum += policy.value;
      kl_sum += kl.value;
      if (!c.gradient.empty()) {
        const double derivative = policy.derivative + config.beta * kl.derivative;
        c.gradient[t] = static_cast<float>(derivative * scale);
      }
    }
    seen.policy_loss += policy_sum * scale;
    if (with_kl) {
      seen.kl_sum += kl_sum;
      seen.num_kl_tokens += num_kept;
    }
    loss += (policy_sum + config.beta * kl_sum) * scale;
  }
  return loss;
}

double sft_loss(const LossNormalizer& normalizer, std::span<const CompletionTerms> completions,
                LossMetrics* metrics) {
  double sum = 0;
  int64_t num_tokens = 0;
  for (const CompletionTerms& c : completions) {
    check_completion(c, false, false);
    std::fill(c.gradient.begin(), c.gradient.end(), 0.0f);
    num_tokens += count_kept(c.log_probs.size(), c.mask);
    check_normalizer(normalizer, num_tokens);
    for (size_t t = 0; t < c.log_probs.size(); ++t) {
      if (!kept(c.mask, t)) continue;
      sum -= c.log_probs[t];
      if (!c.gradient.empty()) {
        c.gradient[t] = static_cast<float>(-1.0 / static_cast<double>(normalizer.num_tokens));
      }
    }
  }
  if (num_tokens == 0) return 0;
  const double loss = sum / static_cast<double>(normalizer.num_tokens);
  if (metrics != nullptr) {
    metrics->num_tokens += num_tokens;
    metrics->policy_loss += loss;
  }
  return loss;
}

}  // namespace octet::rl
