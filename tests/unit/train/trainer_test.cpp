// One step: exact first ratios, no trace of what is not finite, skipped updates.
#include "train/trainer.h"

#include <limits>

#include <gtest/gtest.h>

#include "base/error.h"
#include "rollout/engine.h"
#include "unit/train/train_batch.h"

namespace octet::train {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

TrainerOptions trainer_options() {
  TrainerOptions o;
  o.loss.type = rl::LossType::kDapo;
  o.micro_batch_tokens = 60;
  o.temperature = kTemperature;
  o.learning_rate = 1e-2;
  o.schedule = Schedule::kConstant;
  o.adamw.max_grad_norm = 1.0;
  return o;
}

std::vector<std::vector<uint8_t>> state_bytes(TinyPolicy& p, Trainer& trainer) {
  auto all = test::weight_bytes(p);
  for (const AdamW::Slot& slot : trainer.optimizer().slots()) {
    all.push_back(test::bytes_of(*p.backend, slot.first_moment));
    all.push_back(test::bytes_of(*p.backend, slot.second_moment));
  }
  return all;
}

TinyOptions fp8_full() {
  TinyOptions o;
  o.tied = o.qk_norm = true;
  o.precision.flow = model::Flow::kFp8Full;
  o.fp8_kv = true;
  return o;
}

// From the rollout itself: no pass recomputes old log-probabilities.
TEST(Trainer, TheFirstRatioIsExactlyOne) {
  std::vector<TinyOptions> all(4);
  all[1] = fp8_full();
  all[2].precision.flow = model::Flow::kFp8Lora;
  all[2].training = all[3].training = model::Training::kLora;
  all[2].lora_rank = all[3].lora_rank = 4;
  for (const TinyOptions& options : all) {
    TinyPolicy p(options);
    rollout::Engine engine(*p.backend, p.decoder, p.head, p.pages, nullptr, {});
    Trainer trainer(*p.backend, p.model, p.policy(), nullptr, trainer_options());
    for (uint32_t step = 0; step < 2; ++step) {
      std::vector<rollout::PromptRequest> prompts;
      for (uint32_t i = 0; i < 3; ++i) {
        prompts.push_back(
            {test::random_ids(5 + 9 * i, i), 4, {.seed = 1, .step = step, .prompt = i}});
      }
      rollout::SamplingOptions sampling;
      sampling.temperature = kTemperature;
      sampling.max_new_tokens = 20;
      sampling.stop_ids = {3, 4};
      std::vector<TrainSample> samples;
      for (const rollout::Completion& c : engine.run(prompts, sampling)) {
        EXPECT_EQ(c.policy_version, step);
        TrainSample& s = samples.emplace_back();
        s.ids = prompts[c.prompt].ids;
        s.first_target = static_cast<int64_t>(s.ids.size());
        s.ids.insert(s.ids.end(), c.ids.begin(), c.ids.end());
        s.sampling_log_probs = c.log_probs;
        s.advantage = c.sample % 2 == 0 ? 1.0 : -1.0;
      }
      const rl::MetricList metrics = trainer.step(samples, step);
      EXPECT_EQ(metric(metrics, "ratio/min"), 1.0);
      EXPECT_EQ(metric(metrics, "ratio/max"), 1.0);
      EXPECT_EQ(metric(metrics, "train_rollout_logprob_abs_diff"), 0.0);
      EXPECT_EQ(metric(metrics, "train_rollout_logprob_abs_diff_max"), 0.0);
      EXPECT_EQ(metric(metrics, "token_mult_prob_error"), 1.0);
      EXPECT_EQ(metric(metrics, "num_updates"), 1.0);
      EXPECT_EQ(metric(metrics, "skipped_updates/non_finite"), std::nullopt);
      EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
    }
  }
}

// Adapters that start with B = 0 are the base model: the KL to it is exactly 0, and after a step it
// is not.
TEST(Trainer, TheReferenceOfAdaptersIsTheBaseModel) {
  TinyOptions o;
  o.training = model::Training::kLora;
  o.lora_rank = 4;
  o.zero_b = true;
  o.precision.flow = model::Flow::kFp8Lora;
  TinyPolicy p(o);
  std::vector<TrainSample> samples = make_samples(p);
  const auto reference = log_probs_of(p, samples, {.adapters = false});
  for (size_t i = 0; i < samples.size(); ++i) samples[i].reference_log_probs = reference[i];
  TrainerOptions options = trainer_options();
  options.loss.beta = 0.1;
  Trainer trainer(*p.backend, p.model, p.policy(), nullptr, options);
  EXPECT_EQ(metric(trainer.step(samples, 0), "kl"), 0.0);
  EXPECT_GT(*metric(trainer.step(samples, 1), "kl"), 0.0);
  const auto again = log_probs_of(p, samples, {.adapters = false});
  for (size_t i = 0; i < samples.size(); ++i) {
    test::expect_equal_bits(again[i], reference[i], "the base never moves");
  }
}

// NaN in the loss, and a finite loss whose gradients overflow.
TEST(Trainer, NonFiniteUpdatesLeaveNoTraceAndAreCounted) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), 1e300}) {
    TinyPolicy p(fp8_full()), twin(fp8_full());
    std::vector<TrainSample> samples = make_samples(p);
    Trainer trainer(*p.backend, p.model, p.policy(), nullptr, trainer_options());
    trainer.step(samples, 0);
    const auto before = state_bytes(p, trainer);
    std::vector<TrainSample> spoiled = samples;
    spoiled[5].advantage = bad;
    const rl::MetricList metrics = trainer.step(spoiled, 1);
    EXPECT_TRUE(state_bytes(p, trainer) == before);
    EXPECT_EQ(trainer.optimizer().num_steps(), 1);
    EXPECT_EQ(p.model.weights().policy_version(), 1);
    EXPECT_EQ(metric(metrics, "skipped_updates/non_finite"), 1.0);
    EXPECT_EQ(metric(metrics, "num_updates"), 0.0);
    for (const auto& [name, value] : metrics) EXPECT_TRUE(std::isfinite(value)) << name;

    // The rest of a step goes on as if the bad mini-batch had not been there.
    Trainer other(*twin.backend, twin.model, twin.policy(), nullptr, trainer_options());
    other.step(samples, 0);
    other.step(std::span(spoiled).first(4), 1);
    TrainerOptions halves = trainer_options();
    halves.mini_batches = 2;
    TinyPolicy q(fp8_full());
    Trainer third(*q.backend, q.model, q.policy(), nullptr, trainer_options());
    third.step(samples, 0);
    Trainer split(*q.backend, q.model, q.policy(), nullptr, halves);
    for (size_t i = 0; i < split.optimizer().slots().size(); ++i) {
      auto& to = split.optimizer().slots()[i];
      auto& from = third.optimizer().slots()[i];
      q.backend->upload(from.first_moment.data, to.first_moment);
      q.backend->upload(from.second_moment.data, to.second_moment);
    }
    split.optimizer().set_num_steps(1);
    const rl::MetricList mixed = split.step(spoiled, 1);
    EXPECT_EQ(metric(mixed, "skipped_updates/non_finite"), 1.0);
    EXPECT_EQ(metric(mixed, "num_updates"), 1.0);
    for (const auto& [name, value] : mixed) EXPECT_TRUE(std::isfinite(value)) << name;
    EXPECT_TRUE(state_bytes(q, split) == state_bytes(twin, other));
    EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
  }
}

TEST(Trainer, ANanWeightIsFoundBeforeTheStep) {
  TinyPolicy p(fp8_full());
  const std::vector<TrainSample> samples = make_samples(p);
  Trainer trainer(*p.backend, p.model, p.policy(), nullptr, trainer_options());
  model::Parameter& down = p.parameter("model.layers.0.mlp.down_proj.weight");
  const std::vector<float> whole = test::floats_of(*p.backend, down.master);
  const auto before = state_bytes(p, trainer);
  std::vector<float> spoiled = whole;
  spoiled[10] = std::nanf("");
  p.set(down, spoiled);
  EXPECT_EQ(metric(trainer.step(samples, 0), "skipped_updates/non_finite"), 1.0);
  p.set(down, whole);
  EXPECT_TRUE(state_bytes(p, trainer) == before);
  EXPECT_EQ(metric(trainer.step(samples, 1), "num_updates"), 1.0);
}

TEST(Trainer, UpdatesWithoutATokenAreSkippedAndCounted) {
  TinyPolicy p(fp8_full());
  std::vector<TrainSample> samples = make_samples(p);
  for (TrainSample& s : samples) s.mask.assign(s.sampling_log_probs.size(), 0);
  Trainer trainer(*p.backend, p.model, p.policy(), nullptr, trainer_options());
  const auto before = state_bytes(p, trainer);
  const rl::MetricList metrics = trainer.step(samples, 0);
  EXPECT_TRUE(state_bytes(p, trainer) == before);
  EXPECT_EQ(metric(metrics, "skipped_updates/no_tokens"), 1.0);
  EXPECT_EQ(metric(metrics, "num_updates"), 0.0);
  EXPECT_EQ(metric(metrics, "entropy"), std::nullopt);
  for (const auto& [name, value] : metrics) EXPECT_TRUE(std::isfinite(value)) << name;
  // Only empty completions.
  const std::vector<TrainSample> empty = {make_samples(p)[3], make_samples(p)[3]};
  EXPECT_EQ(metric(trainer.step(empty, 1), "skipped_updates/no_tokens"), 1.0);
  EXPECT_EQ(metric(trainer.step({}, 2), "skipped_updates/no_tokens"), 1.0);
  EXPECT_TRUE(state_bytes(p, trainer) == before);
}

// What a mask leaves out has no influence, whatever was recorded there.
TEST(Trainer, MaskedTokensDoNotCount) {
  TinyPolicy a(fp8_full()), b(fp8_full());
  std::vector<TrainSample> samples = make_samples(a);
  for (TrainSample& s : samples) {
    s.mask.assign(s.sampling_log_probs.size(), 1);
    for (size_t t = 0; t < s.mask.size(); t += 3) s.mask[t] = 0;
  }
  std::vector<TrainSample> noisy = samples;
  for (TrainSample& s : noisy) {
    for (size_t t = 0; t < s.mask.size(); t += 3) {
      s.sampling_log_probs[t] = t % 2 == 0 ? -HUGE_VALF : std::nanf("");
    }
  }
  Trainer first(*a.backend, a.model, a.policy(), nullptr, trainer_options());
  Trainer second(*b.backend, b.model, b.policy(), nullptr, trainer_options());
  EXPECT_EQ(first.step(samples, 0), second.step(noisy, 0));
  EXPECT_TRUE(state_bytes(a, first) == state_bytes(b, second));
}

TEST(Trainer, MiniBatchesAreEqualRunsInOrder) {
  TinyPolicy a(fp8_full()), b(fp8_full());
  const std::vector<TrainSample> samples = make_samples(a, 7);
  TrainerOptions options = trainer_options();
  options.mini_batches = 3;
  options.num_iterations = 2;
  Trainer whole(*a.backend, a.model, a.policy(), nullptr, options);
  const rl::MetricList metrics = whole.step(samples, 0);
  EXPECT_EQ(metric(metrics, "num_updates"), 6.0);
  EXPECT_EQ(metric(metrics, "train_rollout_logprob_abs_diff_max"), 0.0);  // of the first alone
  EXPECT_NE(metric(metrics, "ratio/max"), 1.0);
  Trainer by_hand(*b.backend, b.model, b.policy(), nullptr, trainer_options());
  for (int iteration = 0; iteration < 2; ++iteration) {
    for (const auto& [begin, count] : {std::pair<size_t, size_t>{0, 2}, {2, 2}, {4, 3}}) {
      by_hand.step(std::span(samples).subspan(begin, count), 0);
    }
  }
  EXPECT_TRUE(state_bytes(a, whole) == state_bytes(b, by_hand));
  EXPECT_EQ(whole.num_updates(), 6);
  // More mini-batches than samples.
  options.mini_batches = 50;
  Trainer many(*a.backend, a.model, a.policy(), nullptr, options);
  EXPECT_EQ(metric(many.step(std::span(samples).first(2), 0), "num_updates"), 4.0);
}

TEST(Trainer, LearnsDemonstrations) {
  TinyPolicy p(fp8_full());
  const std::vector<TrainSample> samples = make_samples(p);
  TrainerOptions options = trainer_options();
  options.sft = true;
  options.schedule = Schedule::kLinear;
  options.warmup_updates = 4;
  options.num_updates = 24;
  Trainer trainer(*p.backend, p.model, p.policy(), nullptr, options);
  double first = 0, last = 0;
  for (int64_t step = 0; step < 24; ++step) {
    const rl::MetricList metrics = trainer.step(samples, step);
    EXPECT_EQ(metric(metrics, "learning_rate"),
              learning_rate(Schedule::kLinear, 1e-2, 4, 24, step));
    EXPECT_EQ(metric(metrics, "train_rollout_logprob_abs_diff"), std::nullopt);
    (step == 0 ? first : last) = *metric(metrics, "loss");
  }
  // At first near a guess among 59 ids, in the end nearly known by heart.
  EXPECT_NEAR(first, std::log(59.0), 1.0);
  EXPECT_LT(last, 0.5 * first);
}

// The shares of codes are those of the forward's and backward's activations, not of the weights
// that the update before has quantised.
TEST(Trainer, CodesOfWeightsAreNotCounted) {
  TinyPolicy a(fp8_full()), b(fp8_full());
  const std::vector<TrainSample> samples = make_samples(a);
  TrainerOptions options = trainer_options();
  options.learning_rate = 0;
  options.num_iterations = 2;
  Trainer twice(*a.backend, a.model, a.policy(), nullptr, options);
  options.num_iterations = 1;
  Trainer once(*b.backend, b.model, b.policy(), nullptr, options);
  EXPECT_EQ(metric(twice.step(samples, 0), "fp8/saturated"),
            metric(once.step(samples, 0), "fp8/saturated"));
}

}  // namespace
}  // namespace octet::train
