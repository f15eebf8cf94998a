#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/scoring.h"

namespace octet::train {

using model::TokenScores;

// What the forwards of an update show. An update that is given up adds nothing to its step's.
struct Trainer::Measured {
  rl::LossMetrics loss_metrics;
  double loss = 0;
  double entropy_sum = 0;
  int64_t entropy_tokens = 0;
  // Against the rollout's recorded log-probabilities, before the first update.
  double mismatch_sum = 0, mismatch_max = 0, mult_error_sum = 0;
  int64_t mismatch_tokens = 0;
  ops::QuantizeCounters codes;

  void add(const Measured& other) {
    loss_metrics.add(other.loss_metrics);
    loss += other.loss;
    entropy_sum += other.entropy_sum;
    entropy_tokens += other.entropy_tokens;
    mismatch_sum += other.mismatch_sum;
    mismatch_max = std::max(mismatch_max, other.mismatch_max);
    mult_error_sum += other.mult_error_sum;
    mismatch_tokens += other.mismatch_tokens;
    codes.elements += other.codes.elements;
    codes.saturated += other.codes.saturated;
    codes.underflowed += other.codes.underflowed;
  }
};

// What one step adds up over its updates.
struct Trainer::Tally : Measured {
  double grad_norm_sum = 0;
  int64_t num_applied = 0;
  int64_t num_non_finite = 0;
  int64_t num_empty = 0;
  double learning_rate = 0;
};

Trainer::Trainer(ops::Backend& backend, model::Model& model, const Policy& policy,
                 model::KvStore* shadow_pages, const TrainerOptions& options)
    : backend_(backend),
      model_(model),
      policy_(policy),
      shadow_pages_(shadow_pages),
      options_(options),
      optimizer_(backend.allocator(), model.weights(), options.adamw) {
  if (options.calibration && !options.sft) {
    OCTET_ASSERT(shadow_pages != nullptr);
    calibrator_.emplace(*options.calibration);
  }
}

rl::MetricList Trainer::step(std::span<const TrainSample> samples, int64_t step) {
  const auto count = static_cast<int64_t>(samples.size());
  const int64_t mini_batches = std::min(options_.mini_batches, std::max<int64_t>(1, count));
  const auto range = [&](int64_t m) {
    const int64_t begin = count * m / mini_batches;
    return std::pair{static_cast<size_t>(begin),
                     static_cast<size_t>(count * (m + 1) / mini_batches - begin)};
  };
  const int64_t num_updates = options_.num_iterations * mini_batches;
  const bool measure = calibrator_ && calibrator_->is_due(step) && num_updates > 1;
  Tally tally;

  // The BF16 reference before the first update, of every mini-batch that a later update works on.
  std::vector<std::vector<float>> shadow_old;
  if (measure) {
    const size_t skip = options_.num_iterations > 1 ? 0 : range(0).second;
    shadow_old.resize(skip);
    for (std::vector<float>& row : shadow_log_probs(samples.subspan(skip))) {
      shadow_old.push_back(std::move(row));
    }
  }
  for (int64_t u = 0; u < num_updates; ++u) {
    const auto [begin, size] = range(u % mini_batches);
    update(samples.subspan(begin, size), u == 0, measure && u > 0,
           measure ? std::span<const std::vector<float>>(shadow_old).subspan(begin, size)
                   : std::span<const std::vector<float>>(),
           tally);
  }

  rl::MetricList metrics;
  if (tally.num_applied > 0) {
    metrics.emplace_back("loss", tally.loss / static_cast<double>(tally.num_applied));
  } else if (tally.num_empty > 0) {
    metrics.emplace_back("loss", 0.0);  // nothing was left by the masks
  }
  if (!options_.sft) {
    for (auto& metric : tally.loss_metrics.metrics(tally.num_applied)) metrics.push_back(metric);
  }
  if (tally.entropy_tokens > 0) {
    metrics.emplace_back("entropy", tally.entropy_sum / static_cast<double>(tally.entropy_tokens));
  }
  if (tally.num_applied > 0) {
    metrics.emplace_back("grad_norm", tally.grad_norm_sum / static_cast<double>(tally.num_applied));
  }
  metrics.emplace_back("learning_rate", tally.learning_rate);
  metrics.emplace_back("num_updates", static_cast<double>(tally.num_applied));
  if (tally.num_non_finite > 0) {
    metrics.emplace_back("skipped_updates/non_finite", static_cast<double>(tally.num_non_finite));
  }
  if (tally.num_empty > 0) {
    metrics.emplace_back("skipped_updates/no_tokens", static_cast<double>(tally.num_empty));
  }
  if (tally.mismatch_tokens > 0) {
    const auto tokens = static_cast<double>(tally.mismatch_tokens);
    metrics.emplace_back("train_rollout_logprob_abs_diff", tally.mismatch_sum / tokens);
    metrics.emplace_back("train_rollout_logprob_abs_diff_max", tally.mismatch_max);
    metrics.emplace_back("token_mult_prob_error", tally.mult_error_sum / tokens);
  }
  if (tally.codes.elements > 0) {
    const auto elements = static_cast<double>(tally.codes.elements);
    metrics.emplace_back("fp8/saturated", static_cast<double>(tally.codes.saturated) / elements);
    metrics.emplace_back("fp8/underflowed",
                         static_cast<double>(tally.codes.underflowed) / elements);
  }
  if (calibrator_) {
    const rl::CalibrationTarget target =
        measure ? calibrator_->calibrate() : rl::CalibrationTarget();
    for (auto& metric : rl::calibration_metrics(calibrator_->bounds(), target)) {
      if (measure || metric.first == "calibration/low" || metric.first == "calibration/high") {
        metrics.push_back(metric);
      }
    }
  }
  return metrics;
}

void Trainer::update(std::span<const TrainSample> mini_batch, bool first, bool measure,
                     std::span<const std::vector<float>> shadow_old, Tally& tally) {
  std::vector<std::vector<float>> shadow_now;
  if (measure) shadow_now = shadow_log_probs(mini_batch);

  rl::LossConfig loss_config = options_.loss;
  if (calibrator_) loss_config.clip = calibrator_->bounds();
  rl::LossNormalizer normalizer;
  for (const TrainSample& sample : mini_batch) {
    normalizer.add(static_cast<size_t>(sample.num_targets()), sample.mask);
  }
  tally.learning_rate = learning_rate(options_.schedule, options_.learning_rate,
                                      options_.warmup_updates, options_.num_updates, num_updates_);
  ++num_updates_;
  if (normalizer.skipped()) {
    ++tally.num_empty;
    return;
  }

  optimizer_.zero_gradients(backend_);
  backend_.take_quantize_counters();  // those of the weights are not this forward's
  Measured measured;
  std::vector<std::vector<float>> log_probs;
  const auto ranges = cut_micro_batches(mini_batch, options_.micro_batch_tokens,
                                        policy_.decoder.limits().max_sequences);
  for (const auto& [begin, end] : ranges) {
    const std::span<const TrainSample> micro_batch = mini_batch.subspan(begin, end - begin);
    train_micro_batch(
        backend_, policy_, micro_batch, options_.temperature,
        [&](std::span<const TokenScores> scores, std::span<std::vector<float>> gradients) {
          std::vector<rl::CompletionTerms> terms;
          for (size_t i = 0; i < micro_batch.size(); ++i) {
            const TrainSample& sample = micro_batch[i];
            terms.push_back({.log_probs = scores[i].log_probs,
                             .old_log_probs = sample.sampling_log_probs,
                             .ref_log_probs = sample.reference_log_probs,
                             .mask = sample.mask,
                             .policy_weights = {},
                             .advantage = sample.advantage,
                             .gradient = gradients[i]});
          }
          // This checks the lengths of what the samples bring.
          rl::LossMetrics* const loss_metrics = &measured.loss_metrics;
          measured.loss += options_.sft
                               ? rl::sft_loss(normalizer, terms, loss_metrics)
                               : rl::policy_loss(loss_config, normalizer, terms, loss_metrics);
          for (size_t i = 0; i < micro_batch.size(); ++i) {
            const TrainSample& sample = micro_batch[i];
            for (size_t t = 0; t < scores[i].entropies.size(); ++t) {
              if (!sample.mask.empty() && sample.mask[t] == 0) continue;
              measured.entropy_sum += scores[i].entropies[t];
              ++measured.entropy_tokens;
              if (!first || options_.sft) continue;
              const double difference = std::fabs(static_cast<double>(scores[i].log_probs[t]) -
                                                  sample.sampling_log_probs[t]);
              measured.mismatch_sum += difference;
              measured.mismatch_max = std::max(measured.mismatch_max, difference);
              measured.mult_error_sum += std::exp(difference);
              ++measured.mismatch_tokens;
            }
            if (measure) log_probs.push_back(scores[i].log_probs);
          }
          return std::isfinite(measured.loss);
        });
    if (!std::isfinite(measured.loss)) break;
  }
  measured.codes = backend_.take_quantize_counters();
  UpdateResult result;
  if (std::isfinite(measured.loss)) {
    if (measure) calibrate_with(mini_batch, shadow_old, shadow_now, log_probs);
    result = optimizer_.step(backend_, tally.learning_rate);
  }
  if (!result.applied) {
    ++tally.num_non_finite;
    return;
  }
  ++tally.num_applied;
  tally.add(measured);
  tally.grad_norm_sum += result.grad_norm;
}

std::vector<std::vector<float>> Trainer::shadow_log_probs(std::span<const TrainSample> samples) {
  std::vector<model::ScoringRequest> requests;
  for (const TrainSample& sample : samples) requests.push_back({sample.ids, sample.first_target});
  std::vector<std::vector<float>> result;
  for (TokenScores& scores : model::score_sequences(
           backend_, policy_.decoder, policy_.head, *shadow_pages_, requests, options_.temperature,
           {.shadow = true}, options_.micro_batch_tokens)) {
    result.push_back(std::move(scores.log_probs));
  }
  return result;
}

// Gives the calibrator the ratios of this mini-batch, both before its update. π_old is the policy
// that sampled, so its weight min(π_old / μ, 2) is 1 and w·μ is the sampling probability.
void Trainer::calibrate_with(std::span<const TrainSample> mini_batch,
                             std::span<const std::vector<float>> shadow_old,
                             std::span<const std::vector<float>> shadow_now,
                             std::span<const std::vector<float>> log_probs) {
  std::vector<double> reference, fp8, advantage, weight;
  for (size_t i = 0; i < mini_batch.size(); ++i) {
    const TrainSample& sample = mini_batch[i];
    for (size_t t = 0; t < log_probs[i].size(); ++t) {
      if (!sample.mask.empty() && sample.mask[t] == 0) continue;
      reference.push_back(std::exp(static_cast<double>(shadow_now[i][t]) - shadow_old[i][t]));
      fp8.push_back(std::exp(static_cast<double>(log_probs[i][t]) - sample.sampling_log_probs[t]));
      advantage.push_back(sample.advantage);
      weight.push_back(std::exp(static_cast<double>(sample.sampling_log_probs[t])));
    }
  }
  calibrator_->add(rl::CalibrationTokens{reference, fp8, advantage, weight});
}

}  // namespace octet::train
