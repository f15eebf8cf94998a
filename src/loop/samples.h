// One step's samples: prompts through the rollout engine, rewards, advantages, and what the trainer
// and the logs take from them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "loop/data_source.h"
#include "observe/metrics.h"
#include "reward/reward.h"
#include "rollout/engine.h"
#include "train/micro_batch.h"

namespace octet::loop {

struct SampleBatch {
  std::vector<train::TrainSample> samples;         // by prompt, then sample
  std::vector<observe::CompletionRecord> records;  // the same
  observe::MetricList metrics;
  double reward_seconds = 0;
};

class Sampler {
 public:
  // All borrowed.
  Sampler(const TrainConfig& config, const TextSide& text_side, rollout::Engine& engine,
          std::span<const std::unique_ptr<reward::Reward>> rewards);

  // The rollout of step `step`: num_generations samples of each prompt. `on_progress` as the
  // engine's.
  SampleBatch rollout(std::span<const PromptRow* const> prompts, int64_t step,
                      const rollout::Engine::Progress& on_progress);

  // Greedy answers to `prompts`: the mean reward as `eval/reward` (absent where no sample has one),
  // how many have none where there are any, and `eval/completions/mean_length`.
  observe::MetricList evaluate(std::span<const PromptRow> prompts);

 private:
  struct Scored {
    std::vector<std::string> texts;
    std::vector<std::vector<float>> by_function;
    std::vector<float> rewards;
  };
  Scored score(std::span<const PromptRow* const> prompts,
               std::span<const rollout::Completion> completions);
  rollout::SamplingOptions sampling_options() const;

  const TrainConfig& config_;
  const TextSide& text_side_;
  rollout::Engine& engine_;
  std::span<const std::unique_ptr<reward::Reward>> rewards_;
};

}  // namespace octet::loop
