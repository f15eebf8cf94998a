// What training does to the policy: rewards that rise, KL, losses, schedules, masks.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string>

#include <gtest/gtest.h>

#include "system/train_support.h"

namespace octet::test {
namespace {

TEST(TrainLearning, LossTypes) {
  const Trainer trainer;
  for (const char* type : {"grpo", "dapo", "dr_grpo", "bnpo"}) {
    for (const Arguments& flow : {Arguments{}, kFp8Full}) {
      const std::string run =
          trainer.trained(std::string(type) + (flow.empty() ? "" : "8"),
                          flow + Arguments{std::string("algorithm.loss_type=") + type});
      for (const double loss : values_of(run, "loss")) EXPECT_TRUE(std::isfinite(loss));
      for (const double norm : values_of(run, "grad_norm")) EXPECT_GT(norm, 0) << type;
    }
  }
  // One mini-batch of completions of one length: dapo and bnpo are the same loss.
  EXPECT_EQ(values_of(trainer.path("dapo"), "reward"), values_of(trainer.path("bnpo"), "reward"));
}

TEST(TrainLearning, KlToTheStart) {
  const Trainer trainer(tiny_config_on(tiny_model()));
  const Arguments kl = {"algorithm.beta=0.05", "train.mini_batches=1"};
  for (const Arguments& flow : {Arguments{}, Arguments{"lora.r=4"}, kFp8Full, kFp8Lora}) {
    const std::string name = "run" + std::to_string(flow.size()) + (flow.empty() ? "" : flow[0]);
    const std::vector<double> values = values_of(trainer.trained(name, flow + kl), "kl");
    ASSERT_EQ(values.size(), 4u);
    EXPECT_EQ(values[0], 0) << name;  // the very same numbers
    for (size_t i = 1; i < values.size(); ++i) EXPECT_GT(values[i], 0) << name;
  }
  // A strong pull keeps the policy nearer.
  const auto last_kl = [&](const std::string& name, const std::string& beta) {
    return values_of(trainer.trained(name, {"algorithm.beta=" + beta, "train.max_steps=20"}), "kl")
        .back();
  };
  EXPECT_LT(last_kl("strong", "5.0"), 0.5 * last_kl("weak", "1e-6"));
}

TEST(TrainLearning, IterationsOverTheSameSamples) {
  const Trainer trainer;
  const std::string run = trainer.trained(
      "run", {"algorithm.num_iterations=2", "train.mini_batches=1", "optim.learning_rate=0.05"});
  EXPECT_EQ(values_of(run, "num_updates"), std::vector<double>(4, 2));
  // The second pass is off policy: ratios are not 1 any more.
  for (const double most : values_of(run, "ratio/max")) EXPECT_GT(most, 1);
  EXPECT_EQ(values_of(run, "train_rollout_logprob_abs_diff_max"), std::vector<double>(4, 0));
  // With one update they are.
  const std::string once = trainer.trained("once", {"train.mini_batches=1"});
  EXPECT_EQ(values_of(once, "ratio/max"), std::vector<double>(4, 1));
  EXPECT_EQ(values_of(once, "ratio/min"), std::vector<double>(4, 1));
}

TEST(TrainLearning, MaskedCompletions) {
  const Trainer trainer;
  const Arguments masked = {"algorithm.mask_truncated_completions=true"};
  for (const char* type : {"grpo", "dapo", "dr_grpo"}) {
    const std::string name = type;
    const std::string run =
        trainer.trained(name, masked + Arguments{"algorithm.loss_type=" + name});
    for (const double loss : values_of(run, "loss")) EXPECT_TRUE(std::isfinite(loss));
    // One token cannot be an end after an answer: nearly all are cut, and where all are, the update
    // is skipped and counted.
    const std::string cut = trainer.trained(
        name + "cut", masked + Arguments{"algorithm.loss_type=" + name, "rollout.temperature=0.01",
                                         "rollout.max_completion_length=1", "rollout.top_k=1"});
    EXPECT_EQ(values_of(cut, "completions/clipped_ratio"), std::vector<double>(4, 1));
    EXPECT_EQ(values_of(cut, "skipped_updates/no_tokens"), std::vector<double>(4, 2));
    EXPECT_EQ(values_of(cut, "num_updates"), std::vector<double>(4, 0));
    EXPECT_TRUE(has_event(cut, "updates_skipped", "no token"));
    EXPECT_EQ(values_of(cut, "loss"), std::vector<double>(4, 0));
    EXPECT_TRUE(values_of(cut, "grad_norm").empty());
    EXPECT_TRUE(values_of(cut, "entropy").empty());
  }
}

TEST(TrainLearning, UpdatesThatAreNotFiniteLeaveNoTrace) {
  for (const Arguments& flow : {Arguments{}, kFp8Full}) {
    const Trainer trainer;
    const std::string run = trainer.trained(
        "run", flow + Arguments{"optim.learning_rate=1e30", "optim.lr_scheduler_type=constant",
                                "train.save_steps=1"});
    const std::vector<double> skipped = values_of(run, "skipped_updates/non_finite");
    ASSERT_GE(skipped.size(), 2u);
    EXPECT_EQ(skipped.back(), 2);  // both of the last step
    EXPECT_TRUE(has_event(run, "updates_skipped", "optim.learning_rate"));
    const auto weights = [&](const std::string& step) {
      return read_text(run + "/checkpoints/step-00000" + step + "/state.safetensors");
    };
    EXPECT_TRUE(weights("3") == weights("4"));
    EXPECT_FALSE(weights("1").empty());
  }
}

TEST(TrainLearning, Schedules) {
  const Trainer trainer;
  // The rate of each step's last of two updates, of 8 in all with 4 to warm up.
  const auto rates = [&](const std::string& name) {
    return values_of(trainer.trained(name, {"optim.lr_scheduler_type=" + name,
                                            "optim.warmup_steps=4", "optim.learning_rate=0.01"}),
                     "learning_rate");
  };
  const auto expect = [&](const std::string& name, const std::vector<double>& wanted) {
    const std::vector<double> given = rates(name);
    ASSERT_EQ(given.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(given[i], wanted[i], 1e-15) << name;
  };
  const double pi = std::numbers::pi;
  expect("constant", {0.01, 0.01, 0.01, 0.01});
  expect("constant_with_warmup", {0.0025, 0.0075, 0.01, 0.01});
  expect("linear", {0.0025, 0.0075, 0.0075, 0.0025});
  expect("cosine",
         {0.0025, 0.0075, 0.005 * (1 + std::cos(pi / 4)), 0.005 * (1 + std::cos(3 * pi / 4))});
}

double mean(const std::vector<double>& values, size_t begin, size_t end) {
  return std::accumulate(values.begin() + begin, values.begin() + end, 0.0) /
         static_cast<double>(end - begin);
}

// The demo, small: half of the demonstrations are wrong, and RL puts that right.
TEST(TrainLearning, RewardsRiseInBf16AndFp8Alike) {
  const Trainer trainer;
  const Arguments model = {"model.init.hidden_size=64", "model.init.head_dim=32",
                           "model.init.intermediate_size=128", "reward.functions=exact_match",
                           "rollout.max_completion_length=4"};
  const std::string sft = trainer.trained(
      "sft", model + kSft +
                 Arguments{"data.task_wrong_share=0.5", "train.prompts_per_step=64",
                           "train.mini_batches=1", "train.max_steps=400", "optim.warmup_steps=20",
                           "optim.lr_scheduler_type=cosine", "optim.learning_rate=8e-3"});
  const Trainer second(tiny_config_on(sft + "/model"));
  const Arguments grpo = {"reward.functions=exact_match", "rollout.max_completion_length=4",
                          "rollout.num_generations=8",    "train.prompts_per_step=16",
                          "train.mini_batches=4",         "train.max_steps=160",
                          "train.eval_steps=40",          "optim.lr_scheduler_type=linear",
                          "optim.learning_rate=8e-4"};
  std::vector<double> last;
  for (const Arguments& flow : {Arguments{"precision.flow=bf16"}, kFp8Full}) {
    const std::string run = second.trained(flow[0], grpo + flow);
    const std::vector<double> reward = values_of(run, "reward");
    ASSERT_EQ(reward.size(), 160u);
    const double before = mean(reward, 0, 16), after = mean(reward, 144, 160);
    EXPECT_GT(after, before + 0.15) << flow[0];
    last.push_back(after);
    EXPECT_EQ(values_of(run, "eval/reward").size(), 5u);  // at the start, between, at the end
    const std::vector<double> low = values_of(run, "calibration/low");
    const std::vector<double> high = values_of(run, "calibration/high");
    if (flow == kFp8Full) {
      ASSERT_EQ(low.size(), 160u);
      // The bounds leave where they begin, by more than the 0.05 and 0.1 of one step.
      const auto farthest = [](const std::vector<double>& bounds, double from) {
        double most = 0;
        for (const double bound : bounds) most = std::max(most, std::abs(bound - from));
        return most;
      };
      EXPECT_GT(farthest(low, 0.6), 0.1);
      EXPECT_GT(farthest(high, 1.8), 0.2);
      for (size_t i = 0; i < low.size(); ++i) {
        EXPECT_TRUE(low[i] >= 0.5 && low[i] <= 0.9 && high[i] >= 1.2 && high[i] <= 2.0) << i;
      }
    } else {
      EXPECT_TRUE(low.empty());
    }
  }
  EXPECT_NEAR(last[0], last[1], 0.06);
}

}  // namespace
}  // namespace octet::test
