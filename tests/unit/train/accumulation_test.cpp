// Cutting a batch into micro-batches changes how it is computed, not what.
#include <gtest/gtest.h>

#include "train/trainer.h"
#include "unit/train/train_batch.h"

namespace octet::train {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

struct Result {
  rl::MetricList metrics;
  std::vector<std::vector<float>> gradients;
};

enum class Loss { kSft, kGrpo, kBnpo, kDapo, kDrGrpo };

Result run(const TinyOptions& options, Loss loss, int64_t micro_batch_tokens) {
  TinyPolicy p(options);
  std::vector<TrainSample> samples = make_samples(p);
  // Away from ratio 1, on both sides of the bounds; some tokens left out, one whole completion too.
  RandomSequence random({.seed = 6}, RngUse::kTask);
  for (TrainSample& s : samples) {
    s.reference_log_probs = s.sampling_log_probs;
    for (float& v : s.sampling_log_probs) v += 0.8f * (random.next_unit() - 0.5f);
    for (float& v : s.reference_log_probs) v += 0.3f * (random.next_unit() - 0.5f);
  }
  samples[2].mask.assign(samples[2].sampling_log_probs.size(), 1);
  samples[2].mask[1] = samples[2].mask[4] = 0;
  samples[5].mask.assign(samples[5].sampling_log_probs.size(), 0);

  TrainerOptions o;
  o.sft = loss == Loss::kSft;
  if (!o.sft) o.loss.type = static_cast<rl::LossType>(static_cast<int>(loss) - 1);
  o.loss.beta = 0.05;
  o.loss.max_completion_length = 30;
  o.micro_batch_tokens = micro_batch_tokens;
  o.temperature = kTemperature;
  o.learning_rate = 1e-3;
  o.schedule = Schedule::kConstant;
  Trainer trainer(*p.backend, p.model, p.policy(), nullptr, o);
  Result result{trainer.step(samples, 0), {}};
  for (const model::Parameter& parameter : p.model.weights().parameters()) {
    result.gradients.push_back(test::floats_of(*p.backend, parameter.gradient));
  }
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
  return result;
}

constexpr Loss kLosses[] = {Loss::kSft, Loss::kGrpo, Loss::kBnpo, Loss::kDapo, Loss::kDrGrpo};

TEST(Accumulation, OfEightEqualsABatchOfEight) {
  TinyOptions o;
  o.precision.float32 = true;
  o.tied = o.qk_norm = o.bias = true;
  for (const Loss loss : kLosses) {
    const Result whole = run(o, loss, 512);
    for (const int64_t tokens : {1, 60}) {
      const Result cut = run(o, loss, tokens);
      EXPECT_DOUBLE_EQ(*metric(cut.metrics, "loss"), *metric(whole.metrics, "loss"));
      for (size_t i = 0; i < whole.gradients.size(); ++i) {
        double norm = 0, difference = 0;
        for (size_t j = 0; j < whole.gradients[i].size(); ++j) {
          const double a = whole.gradients[i][j], b = cut.gradients[i][j];
          norm += a * a;
          difference += (a - b) * (a - b);
        }
        ASSERT_GT(norm, 0);
        EXPECT_LE(std::sqrt(difference), 1e-5 * std::sqrt(norm))
            << "loss " << static_cast<int>(loss) << ", parameter " << i;
      }
    }
  }
}

TEST(Accumulation, LossAndRatiosAreEqualInFp8) {
  for (const model::WeightScales scales :
       {model::WeightScales::kTensor, model::WeightScales::kChannel, model::WeightScales::kBlock}) {
    TinyOptions o;
    o.tied = o.qk_norm = true;
    o.precision.flow = model::Flow::kFp8Full;
    o.precision.scales = scales;
    o.fp8_kv = true;
    for (const Loss loss : kLosses) {
      const Result whole = run(o, loss, 512);
      const Result cut = run(o, loss, 1);
      ASSERT_EQ(whole.metrics.size(), cut.metrics.size());
      for (size_t i = 0; i < whole.metrics.size(); ++i) {
        const auto& [name, value] = whole.metrics[i];
        EXPECT_EQ(cut.metrics[i].first, name);
        if (name.starts_with("fp8/") || name == "grad_norm") continue;
        if (name == "ratio/min" || name == "ratio/max" || name.starts_with("clip_ratio/")) {
          EXPECT_EQ(cut.metrics[i].second, value) << name;
        } else {  // sums whose order of addition in float64 is another
          EXPECT_NEAR(cut.metrics[i].second, value, 1e-14 * (1 + std::fabs(value))) << name;
        }
      }
      if (loss != Loss::kSft) {
        EXPECT_GT(*metric(whole.metrics, "clip_ratio/region_mean"), 0);
        EXPECT_GT(*metric(whole.metrics, "kl"), 0);
      }
    }
  }
}

TEST(MicroBatches, AreCutByTokensAndSequences) {
  std::vector<TrainSample> samples(5);
  const int64_t lengths[] = {4, 5, 20, 3, 7};
  for (size_t i = 0; i < 5; ++i) samples[i].ids.resize(static_cast<size_t>(lengths[i]));
  using Ranges = std::vector<std::pair<size_t, size_t>>;
  EXPECT_EQ(cut_micro_batches(samples, 10, 8), (Ranges{{0, 2}, {2, 3}, {3, 5}}));
  EXPECT_EQ(cut_micro_batches(samples, 9, 8), (Ranges{{0, 2}, {2, 3}, {3, 4}, {4, 5}}));
  EXPECT_EQ(cut_micro_batches(samples, 1000, 2), (Ranges{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(cut_micro_batches(samples, 1, 8).size(), 5u);
  EXPECT_TRUE(cut_micro_batches({}, 10, 8).empty());
}

TEST(MicroBatches, TooFewPagesAreAnErrorThatKeepsNone) {
  TinyOptions o;
  TinyPolicy p(o);
  const std::vector<TrainSample> samples = make_samples(p);
  o.num_pages = 3;
  TinyPolicy small(o);
  const auto nothing = [](auto, auto) { return true; };
  EXPECT_THROW(train_micro_batch(*small.backend, small.policy(), samples, 1.0f, nothing), Error);
  EXPECT_EQ(small.pages.num_free(), 3);
  const auto thrower = [](auto, auto) -> bool { throw std::runtime_error("loss"); };
  EXPECT_THROW(train_micro_batch(*p.backend, p.policy(), samples, 1.0f, thrower),
               std::runtime_error);
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

}  // namespace
}  // namespace octet::train
