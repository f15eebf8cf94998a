#include "loop/samples.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "rl/advantages.h"

namespace octet::loop {
namespace {

struct MeanAndDeviation {
  double mean = std::numeric_limits<double>::quiet_NaN();
  double deviation = std::numeric_limits<double>::quiet_NaN();
};

// Over the values that are finite; the sample deviation.
MeanAndDeviation moments(std::span<const float> values) {
  double sum = 0, squares = 0;
  int64_t count = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) continue;
    sum += value;
    ++count;
  }
  MeanAndDeviation result;
  if (count == 0) return result;
  result.mean = sum / static_cast<double>(count);
  for (const float value : values) {
    if (std::isfinite(value)) squares += (value - result.mean) * (value - result.mean);
  }
  if (count > 1) result.deviation = std::sqrt(squares / static_cast<double>(count - 1));
  return result;
}

void add_finite(observe::MetricList& metrics, const std::string& name, double value) {
  if (std::isfinite(value)) metrics.emplace_back(name, value);
}

void add_lengths(observe::MetricList& metrics, std::span<const rollout::Completion> completions) {
  double sum = 0, ended_sum = 0, least = std::numeric_limits<double>::infinity(), most = 0;
  int64_t ended = 0;
  for (const rollout::Completion& completion : completions) {
    const auto length = static_cast<double>(completion.ids.size());
    sum += length;
    least = std::min(least, length);
    most = std::max(most, length);
    if (completion.finish_reason == rollout::FinishReason::kStop) {
      ended_sum += length;
      ++ended;
    }
  }
  const auto count = static_cast<double>(completions.size());
  metrics.emplace_back("completions/mean_length", sum / count);
  metrics.emplace_back("completions/min_length", least);
  metrics.emplace_back("completions/max_length", most);
  metrics.emplace_back("completions/clipped_ratio", 1.0 - static_cast<double>(ended) / count);
  if (ended > 0) {
    metrics.emplace_back("completions/mean_terminated_length",
                         ended_sum / static_cast<double>(ended));
  }
}

}  // namespace

Sampler::Sampler(const TrainConfig& config, const TextSide& text_side, rollout::Engine& engine,
                 std::span<const std::unique_ptr<reward::Reward>> rewards)
    : config_(config), text_side_(text_side), engine_(engine), rewards_(rewards) {}

rollout::SamplingOptions Sampler::sampling_options() const {
  const RolloutSection& rollout = config_.rollout;
  rollout::SamplingOptions options;
  options.temperature = static_cast<float>(rollout.temperature);
  options.top_p = static_cast<float>(rollout.top_p);
  options.min_p = static_cast<float>(rollout.min_p);
  options.top_k = static_cast<int32_t>(rollout.top_k);
  options.max_new_tokens = rollout.max_completion_length;
  options.stop_ids = text_side_.stop_ids;
  options.stop = rollout.stop;
  return options;
}

Sampler::Scored Sampler::score(std::span<const PromptRow* const> prompts,
                               std::span<const rollout::Completion> completions) {
  Scored scored;
  std::vector<std::string> prompt_texts;
  std::vector<std::vector<int32_t>> ids;
  std::vector<Json> columns;
  for (const rollout::Completion& completion : completions) {
    const PromptRow& prompt = *prompts[completion.prompt];
    scored.texts.push_back(text_side_.completion_text(completion.ids, completion.stop_string));
    prompt_texts.push_back(prompt.text);
    ids.push_back(completion.ids);
    columns.push_back(*prompt.columns);
  }
  const reward::RewardBatch batch{prompt_texts, scored.texts, ids, columns};
  for (const auto& reward : rewards_) scored.by_function.push_back(reward->score(batch));
  scored.rewards = reward::combine_rewards(scored.by_function, config_.reward.reward_weights);
  return scored;
}

SampleBatch Sampler::rollout(std::span<const PromptRow* const> prompts, int64_t step,
                             const rollout::Engine::Progress& on_progress) {
  std::vector<rollout::PromptRequest> requests;
  for (size_t i = 0; i < prompts.size(); ++i) {
    requests.push_back({prompts[i]->ids, config_.rollout.num_generations,
                        RngKey{.seed = static_cast<uint64_t>(config_.run.seed),
                               .step = static_cast<uint32_t>(step),
                               .prompt = static_cast<uint32_t>(i)}});
  }
  const std::vector<rollout::Completion> completions =
      engine_.run(requests, sampling_options(), on_progress);
  const auto rolled_out = std::chrono::steady_clock::now();
  Scored scored = score(prompts, completions);
  const std::chrono::duration<double> reward_seconds =
      std::chrono::steady_clock::now() - rolled_out;

  std::vector<int64_t> groups;
  for (const rollout::Completion& completion : completions) groups.push_back(completion.prompt);
  const rl::Advantages advantages = rl::group_advantages(
      scored.rewards, groups,
      rl::parse_scale_rewards(config_.algorithm.scale_rewards, "algorithm.scale_rewards"));

  SampleBatch batch;
  batch.reward_seconds = reward_seconds.count();
  batch.metrics = advantages.stats.metrics();
  if (advantages.stats.num_missing_rewards > 0) {
    batch.metrics.emplace_back("rewards/missing",
                               static_cast<double>(advantages.stats.num_missing_rewards));
  }
  for (size_t f = 0; f < rewards_.size(); ++f) {
    const MeanAndDeviation m = moments(scored.by_function[f]);
    add_finite(batch.metrics, fmt::format("rewards/{}/mean", rewards_[f]->name()), m.mean);
    add_finite(batch.metrics, fmt::format("rewards/{}/std", rewards_[f]->name()), m.deviation);
  }
  add_lengths(batch.metrics, completions);

  for (size_t i = 0; i < completions.size(); ++i) {
    const rollout::Completion& completion = completions[i];
    const bool truncated = completion.finish_reason == rollout::FinishReason::kLength;
    train::TrainSample& sample = batch.samples.emplace_back();
    sample.ids = prompts[completion.prompt]->ids;
    sample.first_target = static_cast<int64_t>(sample.ids.size());
    sample.ids.insert(sample.ids.end(), completion.ids.begin(), completion.ids.end());
    sample.advantage = advantages.values[i];
    sample.sampling_log_probs = completion.log_probs;
    if (truncated && config_.algorithm.mask_truncated_completions) {
      sample.mask.assign(completion.ids.size(), 0);
    }
    observe::CompletionRecord& record = batch.records.emplace_back();
    record.prompt = prompts[completion.prompt]->text;
    record.completion = std::move(scored.texts[i]);
    record.num_tokens = static_cast<int64_t>(completion.ids.size());
    record.finish_reason = truncated ? "length" : "stop";
    record.reward = scored.rewards[i];
    for (size_t f = 0; f < rewards_.size(); ++f) {
      record.rewards.emplace_back(rewards_[f]->name(), scored.by_function[f][i]);
    }
    record.advantage = advantages.values[i];
  }
  return batch;
}

observe::MetricList Sampler::evaluate(std::span<const PromptRow> prompts) {
  std::vector<rollout::PromptRequest> requests;
  std::vector<const PromptRow*> rows;
  for (const PromptRow& row : prompts) {
    rows.push_back(&row);
    requests.push_back({row.ids, 1, RngKey{}});
  }
  rollout::SamplingOptions sampling = sampling_options();
  sampling.temperature = 0;
  const std::vector<rollout::Completion> completions = engine_.run(requests, sampling);
  const Scored scored = score(rows, completions);
  observe::MetricList metrics;
  add_finite(metrics, "eval/reward", moments(scored.rewards).mean);
  const auto missing = std::ranges::count_if(scored.rewards, [](float r) { return std::isnan(r); });
  if (missing > 0) metrics.emplace_back("eval/rewards/missing", static_cast<double>(missing));
  double tokens = 0;
  for (const rollout::Completion& completion : completions) {
    tokens += static_cast<double>(completion.ids.size());
  }
  metrics.emplace_back("eval/completions/mean_length",
                       tokens / static_cast<double>(std::max<size_t>(1, completions.size())));
  return metrics;
}

}  // namespace octet::loop
