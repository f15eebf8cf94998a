// From prompts to what the trainer gets: groups, rewards, advantages, texts.
#include "loop/samples.h"

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/tiny_policy.h"

namespace octet::loop {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

// Rewards as a function of the place in the batch.
class FixedReward : public reward::Reward {
 public:
  explicit FixedReward(std::vector<float> values) : values_(std::move(values)) {}
  std::string name() const override { return "fixed"; }
  std::vector<float> score(const reward::RewardBatch& batch) override {
    texts.assign(batch.completions.begin(), batch.completions.end());
    EXPECT_EQ(batch.columns.size(), batch.size());
    std::vector<float> result(batch.size());
    for (size_t i = 0; i < result.size(); ++i) result[i] = values_[i % values_.size()];
    return result;
  }
  std::vector<std::string> texts;

 private:
  std::vector<float> values_;
};

class SamplerTest : public ::testing::Test {
 protected:
  SamplerTest()
      : policy_(options()),
        engine_(*policy_.backend, policy_.decoder, policy_.head, policy_.pages, &tokenizer_, {}) {
    config_ = parse_config(R"([model]
path = "m"
[data]
train = "t"
[reward]
functions = ["exact_match"]
[rollout]
num_generations = 4
max_completion_length = 12
)",
                           "c.toml");
    text_side_.tokenizer = tokenizer_;
    text_side_.stop_ids = {ArithmeticTask::kEosId};
    for (const char* text : {"1+2=", "34+5="}) {
      PromptRow& row = rows_.emplace_back();
      row.text = text;
      row.ids = tokenizer_.encode(text);
      row.columns = std::make_shared<Json>(Json{{"answer", "3"}});
    }
  }
  static TinyOptions options() {
    TinyOptions o;
    o.vocab = 16;
    o.num_known = 13;
    return o;
  }
  SampleBatch rollout(std::vector<float> values) {
    rewards_.clear();
    rewards_.push_back(std::make_unique<FixedReward>(std::move(values)));
    Sampler sampler(config_, text_side_, engine_, rewards_);
    const std::vector<const PromptRow*> prompts = {&rows_[0], &rows_[1]};
    return sampler.rollout(prompts, 0, {});
  }
  static std::optional<double> metric(const SampleBatch& batch, std::string_view name) {
    for (const auto& [key, value] : batch.metrics) {
      if (key == name) return value;
    }
    return std::nullopt;
  }

  text::Tokenizer tokenizer_ = text::Tokenizer::from_json(ArithmeticTask::tokenizer_json(), "task");
  TinyPolicy policy_;
  rollout::Engine engine_;
  TrainConfig config_;
  TextSide text_side_;
  std::vector<PromptRow> rows_;
  std::vector<std::unique_ptr<reward::Reward>> rewards_;
};

TEST_F(SamplerTest, SamplesCarryTheirGroupsAdvantagesAndLogProbs) {
  const SampleBatch batch = rollout({1, 0, 0, 1, 0, 0, 0, 0});
  ASSERT_EQ(batch.samples.size(), 8u);
  for (size_t i = 0; i < 8; ++i) {
    const train::TrainSample& s = batch.samples[i];
    const PromptRow& row = rows_[i / 4];
    EXPECT_EQ(s.first_target, static_cast<int64_t>(row.ids.size()));
    EXPECT_TRUE(std::equal(row.ids.begin(), row.ids.end(), s.ids.begin()));
    EXPECT_EQ(static_cast<int64_t>(s.sampling_log_probs.size()), s.num_targets());
    EXPECT_TRUE(s.mask.empty());
    const bool ended = s.ids.back() == ArithmeticTask::kEosId;
    EXPECT_EQ(batch.records[i].finish_reason, ended ? "stop" : "length");
  }
  // (1 − 0.5) / (√(1/3) + 1e-4); the second group has no variance.
  const double expected = 0.5 / (std::sqrt(1.0 / 3) + 1e-4);
  EXPECT_NEAR(batch.samples[0].advantage, expected, 1e-6);
  EXPECT_NEAR(batch.samples[1].advantage, -expected, 1e-6);
  for (size_t i = 4; i < 8; ++i) EXPECT_EQ(batch.samples[i].advantage, 0.0);
  EXPECT_EQ(metric(batch, "reward"), 0.25);
  EXPECT_EQ(metric(batch, "frac_reward_zero_std"), 0.5);
  EXPECT_EQ(metric(batch, "rewards/fixed/mean"), 0.25);
}

TEST_F(SamplerTest, MissingRewardsDoNotPoisonTheirGroup) {
  const float nan = std::nanf("");
  const SampleBatch batch = rollout({1, nan, 0, 0, nan, nan, nan, nan});
  const double mean = 1.0 / 3, deviation = std::sqrt(1.0 / 3);
  EXPECT_NEAR(batch.samples[0].advantage, (1 - mean) / (deviation + 1e-4), 1e-6);
  EXPECT_EQ(batch.samples[1].advantage, 0.0);
  EXPECT_NEAR(batch.samples[2].advantage, -mean / (deviation + 1e-4), 1e-6);
  for (size_t i = 4; i < 8; ++i) EXPECT_EQ(batch.samples[i].advantage, 0.0);
  EXPECT_EQ(metric(batch, "rewards/missing"), 5.0);
  for (const auto& [name, value] : batch.metrics) EXPECT_TRUE(std::isfinite(value)) << name;
  // All missing: no reward is reported, and nothing else is spoilt.
  const SampleBatch none = rollout({nan});
  for (const train::TrainSample& s : none.samples) EXPECT_EQ(s.advantage, 0.0);
  EXPECT_EQ(metric(none, "rewards/missing"), 8.0);
  EXPECT_EQ(metric(none, "rewards/fixed/mean"), std::nullopt);
}

TEST_F(SamplerTest, TruncatedCompletionsCanBeMasked) {
  config_.algorithm.mask_truncated_completions = true;
  const SampleBatch batch = rollout({1, 0});
  bool some = false;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const train::TrainSample& s = batch.samples[i];
    const bool truncated = batch.records[i].finish_reason == "length";
    some |= truncated;
    EXPECT_EQ(s.mask,
              std::vector<uint8_t>(truncated ? static_cast<size_t>(s.num_targets()) : 0, 0));
  }
  EXPECT_TRUE(some);
}

// The text ends before the stop string. One that is a special token's text is not in the decoded
// text, which then stays whole.
TEST_F(SamplerTest, StopStringsEndTheText) {
  for (const std::string stop : {"1", "<|endoftext|>"}) {
    config_.rollout.stop = {stop};
    config_.rollout.max_completion_length = 50;
    text_side_.stop_ids.clear();
    const SampleBatch batch = rollout({1, 0});
    const auto& texts = static_cast<FixedReward&>(*rewards_[0]).texts;
    bool some = false;
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      EXPECT_EQ(texts[i].find(stop), std::string::npos);
      if (batch.records[i].finish_reason != "stop") continue;
      some = true;
      const train::TrainSample& s = batch.samples[i];
      const std::vector<int32_t> ids(s.ids.begin() + s.first_target, s.ids.end() - 1);
      EXPECT_EQ(texts[i], tokenizer_.decode(ids, {.skip_special_tokens =
                                                      true}));  // all but the token that stopped it
    }
    EXPECT_TRUE(some) << stop;
  }
}

TEST_F(SamplerTest, EvaluationIsGreedy) {
  rewards_.push_back(std::make_unique<FixedReward>(std::vector<float>{1, 0}));
  Sampler sampler(config_, text_side_, engine_, rewards_);
  const observe::MetricList first = sampler.evaluate(rows_);
  const auto texts = static_cast<FixedReward&>(*rewards_[0]).texts;
  config_.run.seed = 99;
  EXPECT_EQ(sampler.evaluate(rows_), first);
  EXPECT_EQ(static_cast<FixedReward&>(*rewards_[0]).texts, texts);
  EXPECT_EQ(first[0], (std::pair<std::string, double>("eval/reward", 0.5)));
}

}  // namespace
}  // namespace octet::loop
