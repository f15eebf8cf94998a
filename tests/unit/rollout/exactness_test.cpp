// The contract that everything rests on: a log-probability sampled by the engine is, bit for bit,
// the one that scoring and the training forward compute, whatever stands beside it.
#include <gtest/gtest.h>

#include "rollout/engine.h"
#include "support/completions.h"
#include "support/tiny_policy.h"

namespace octet::rollout {
namespace {

using model::Flow;
using model::WeightScales;
using test::TinyOptions;
using test::TinyPolicy;

constexpr float kTemperature = 0.7f;
constexpr int64_t kNumSamples = 4;

struct Case {
  std::string name;
  TinyOptions options;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> result;
  bool qwen = false;
  const auto add = [&](const std::string& name, Flow flow, WeightScales scales, int64_t rank) {
    qwen = !qwen;
    for (const bool fp8_kv : {false, true}) {
      qwen = !qwen;  // each kind of model meets each cache
      TinyOptions o;
      o.precision.flow = flow;
      o.precision.scales = scales;
      o.lora_rank = rank;
      o.training = rank > 0 ? model::Training::kLora : model::Training::kFull;
      o.fp8_kv = fp8_kv;
      o.tied = o.qk_norm = qwen;
      o.bias = !qwen;
      o.window = qwen ? 0 : 8;
      o.threads = 1;
      if (qwen) o.hidden = 160;
      result.push_back(
          {name + (fp8_kv ? "_Fp8Kv" : "_Bf16Kv") + (qwen ? "_QkNormTied" : "_BiasWindow"), o});
    }
  };
  add("Bf16", Flow::kBf16, WeightScales::kBlock, 0);
  add("Bf16Lora", Flow::kBf16, WeightScales::kBlock, 5);
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    const std::string word(model::weight_scales_name(scales));
    add("Fp8Full_" + word, Flow::kFp8Full, scales, 0);
    add("Fp8Lora_" + word, Flow::kFp8Lora, scales, 5);
  }
  return result;
}

// Lengths around a page of 16 tokens, and one of several pages.
std::vector<PromptRequest> requests() {
  std::vector<PromptRequest> result;
  uint32_t index = 0;
  for (const int64_t length : {1, 15, 16, 17, 33}) {
    result.push_back({test::random_ids(length, index), kNumSamples,
                      RngKey{.seed = 5, .step = 2, .prompt = index}});
    ++index;
  }
  return result;
}

SamplingOptions sampling() {
  SamplingOptions s;
  s.temperature = kTemperature;
  s.top_p = 0.95f;
  s.max_new_tokens = 14;
  s.stop_ids = {7};
  return s;
}

std::vector<Completion> sample(TinyPolicy& p, const EngineOptions& options,
                               std::span<const PromptRequest> prompts,
                               EngineStats* stats = nullptr) {
  Engine engine(*p.backend, p.decoder, p.head, p.pages, nullptr, options);
  std::vector<Completion> completions = engine.run(prompts, sampling());
  if (stats != nullptr) *stats = engine.stats();
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
  return completions;
}

std::vector<train::TrainSample> train_samples(std::span<const PromptRequest> prompts,
                                              std::span<const Completion> completions) {
  std::vector<train::TrainSample> samples;
  for (const Completion& completion : completions) {
    train::TrainSample& s = samples.emplace_back();
    s.ids = prompts[completion.prompt].ids;
    s.first_target = static_cast<int64_t>(s.ids.size());
    s.ids.insert(s.ids.end(), completion.ids.begin(), completion.ids.end());
    s.sampling_log_probs = completion.log_probs;
  }
  return samples;
}

void expect_scored(TinyPolicy& p, std::span<const train::TrainSample> samples, int64_t max_tokens) {
  std::vector<model::ScoringRequest> scoring;
  for (const train::TrainSample& s : samples) scoring.push_back({s.ids, s.first_target});
  const auto scores = model::score_sequences(*p.backend, p.decoder, p.head, p.pages, scoring,
                                             kTemperature, {}, max_tokens);
  for (size_t i = 0; i < samples.size(); ++i) {
    test::expect_equal_bits(samples[i].sampling_log_probs, scores[i].log_probs,
                            "scored by " + std::to_string(max_tokens));
  }
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

void expect_trained(TinyPolicy& p, std::span<const train::TrainSample> samples, size_t size) {
  for (size_t begin = 0; begin < samples.size(); begin += size) {
    const auto part = samples.subspan(begin, std::min(size, samples.size() - begin));
    train::train_micro_batch(
        *p.backend, p.policy(), part, kTemperature,
        [&](std::span<const model::TokenScores> scores, std::span<std::vector<float>> gradients) {
          for (size_t i = 0; i < part.size(); ++i) {
            test::expect_equal_bits(part[i].sampling_log_probs, scores[i].log_probs,
                                    "micro-batch of " + std::to_string(size));
            for (float& g : gradients[i]) g = 0.5f;
          }
          return begin == 0;  // one backward: it must leave the next forward alone
        });
  }
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

class Exactness : public ::testing::TestWithParam<Case> {};

TEST_P(Exactness, SampledEqualsScoredEqualsTrained) {
  TinyPolicy p(GetParam().options);
  const std::vector<PromptRequest> prompts = requests();
  EngineStats stats;
  const std::vector<Completion> completions = sample(p, {.max_num_seqs = 16}, prompts, &stats);
  ASSERT_EQ(completions.size(), prompts.size() * kNumSamples);
  // The prompt of a group is computed once.
  EXPECT_EQ(stats.num_prompt_tokens, 1 + 15 + 16 + 17 + 33);
  EXPECT_EQ(stats.num_preemptions, 0);
  for (size_t i = 0; i < completions.size(); ++i) {
    EXPECT_EQ(completions[i].prompt, static_cast<int64_t>(i) / kNumSamples);
    EXPECT_EQ(completions[i].sample, static_cast<int64_t>(i) % kNumSamples);
  }
  expect_equal(sample(p, {.max_num_seqs = 1}, prompts), completions, "one at a time");
  expect_equal(sample(p, {.max_num_seqs = 3}, prompts), completions, "three at a time");
  expect_equal(sample(p, {.max_num_seqs = 16, .max_batch_tokens = 5}, prompts), completions,
               "prefill by five tokens");
  EngineStats ahead;
  expect_equal(sample(p, {.max_num_seqs = 16, .look_ahead = true}, prompts, &ahead), completions,
               "a step ahead");
  EXPECT_EQ(ahead.num_sampled_tokens, stats.num_sampled_tokens);
  EXPECT_EQ(ahead.num_prompt_tokens, stats.num_prompt_tokens);
  expect_equal(sample(p, {.max_num_seqs = 3, .max_batch_tokens = 5, .look_ahead = true}, prompts),
               completions, "a step ahead, three at a time, by five tokens");

  const std::vector<train::TrainSample> samples = train_samples(prompts, completions);
  for (const int64_t max_tokens : {0, 40, 5}) expect_scored(p, samples, max_tokens);
  for (const size_t size : {1, 2, 4}) expect_trained(p, samples, size);

  // The first sample of each prompt, without its group.
  for (size_t i = 0; i < prompts.size(); ++i) {
    PromptRequest alone = prompts[i];
    alone.num_samples = 1;
    expect_equal(sample(p, {}, {&alone, 1}), std::span(completions).subspan(i * kNumSamples, 1),
                 "alone");
  }
}

TEST_P(Exactness, NeitherThreadsNorAShortPoolChangeABit) {
  TinyPolicy p(GetParam().options);
  const std::vector<PromptRequest> prompts = requests();
  const std::vector<Completion> completions = sample(p, {.max_num_seqs = 16}, prompts);

  TinyOptions o = GetParam().options;
  o.threads = 2;
  o.num_pages = 5;   // the longest sequence takes three
  o.chunk_rows = 3;  // fewer than a group has samples
  o.max_tokens = 50;
  o.max_sequences = 7;
  TinyPolicy small(o);
  EngineStats stats;
  expect_equal(sample(small, {.max_num_seqs = 16}, prompts, &stats), completions,
               "two threads, five pages");
  EXPECT_GT(stats.num_preemptions, 0);
  expect_equal(sample(small, {.max_num_seqs = 16, .look_ahead = true}, prompts, &stats),
               completions, "a step ahead in five pages");
  EXPECT_GT(stats.num_preemptions, 0);
  const std::vector<train::TrainSample> samples = train_samples(prompts, completions);
  expect_scored(small, samples, 0);
  expect_trained(small, samples, 1);
}

INSTANTIATE_TEST_SUITE_P(Flows, Exactness, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace octet::rollout
