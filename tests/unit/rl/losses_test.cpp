#include "rl/losses.h"

#include <cmath>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "unit/rl/loss_batch.h"

namespace octet::rl {
namespace {

const LossType kAllTypes[] = {LossType::kGrpo, LossType::kBnpo, LossType::kDapo, LossType::kDrGrpo};

// Multiples of 2^-10, so that a step of 2^-10 is exact in float32.
float on_grid(double value) { return static_cast<float>(std::round(value * 1024) / 1024); }

LossBatch random_batch(size_t num_rows, uint64_t seed) {
  RandomSequence random({seed, 0, 0, 0}, RngUse::kInit);
  LossBatch batch;
  for (size_t i = 0; i < num_rows; ++i) {
    LossRow row;
    row.advantage = random.next_normal();
    const size_t num_tokens = i == 2 ? 0 : 1 + random.next_below(12);  // one is empty
    for (size_t t = 0; t < num_tokens; ++t) {
      const double old = -2.0 * random.next_unit();
      row.old_log_probs.push_back(on_grid(old));
      row.log_probs.push_back(on_grid(old + 0.3 * random.next_normal()));
      row.ref_log_probs.push_back(on_grid(old + 0.3 * random.next_normal()));
      row.mask.push_back(i != 1 && random.next_below(5) != 0);  // one is masked altogether
    }
    batch.rows.push_back(row);
  }
  return batch;
}

LossConfig config_of(LossType type, double beta = 0) {
  LossConfig config;
  config.type = type;
  config.beta = beta;
  config.clip = ClipBounds::from_epsilon(0.2, 0.28);
  config.max_completion_length = 16;
  return config;
}

TEST(Losses, AccumulationOfEightEqualsABatchOfEight) {
  for (const LossType type : kAllTypes) {
    SCOPED_TRACE(static_cast<int>(type));
    LossBatch whole = random_batch(8, 5);
    LossBatch parts = whole;
    const LossResult one = whole.run(config_of(type, 0.04));
    const LossResult eight = parts.run(config_of(type, 0.04), 1);
    EXPECT_EQ(one.loss, eight.loss);  // one addition per completion in either case
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(whole.rows[i].gradient, parts.rows[i].gradient);
    const MetricList a = one.metrics.metrics();
    const MetricList b = eight.metrics.metrics();
    ASSERT_EQ(a.size(), b.size());
    for (size_t m = 0; m < a.size(); ++m) {
      EXPECT_EQ(a[m].first, b[m].first);
      EXPECT_NEAR(a[m].second, b[m].second, 1e-14 * std::abs(a[m].second)) << a[m].first;
    }
  }
}

TEST(Losses, SftAccumulates) {
  LossBatch batch = random_batch(8, 6);
  for (LossRow& row : batch.rows) row.old_log_probs.clear();
  const std::vector<CompletionTerms> terms = batch.terms();
  LossNormalizer normalizer;
  normalizer.add(terms);
  double sum = 0;
  int64_t num_tokens = 0;
  for (const LossRow& row : batch.rows) {
    for (size_t t = 0; t < row.mask.size(); ++t) {
      if (row.mask[t] == 0) continue;
      sum -= row.log_probs[t];
      ++num_tokens;
    }
  }
  LossMetrics metrics;
  EXPECT_NEAR(sft_loss(normalizer, terms, &metrics), sum / num_tokens, 1e-14);
  double eight = 0;
  for (size_t i = 0; i < 8; ++i) eight += sft_loss(normalizer, std::span(terms).subspan(i, 1), {});
  EXPECT_NEAR(eight, sum / num_tokens, 1e-14);
  EXPECT_EQ(metrics.num_tokens, num_tokens);
  for (const LossRow& row : batch.rows) {
    for (size_t t = 0; t < row.mask.size(); ++t) {
      EXPECT_EQ(row.gradient[t], row.mask[t] != 0 ? static_cast<float>(-1.0 / num_tokens) : 0.0f);
    }
  }
  EXPECT_TRUE(std::isnan(metric(metrics.metrics(), "clip_ratio/low_mean")));  // absent
}

TEST(Losses, GradientEqualsFiniteDifferences) {
  constexpr float kStep = 0x1p-10f;
  for (const LossType type : kAllTypes) {
    for (const KlEstimator kl : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
      LossConfig config = config_of(type, 0.5);
      config.kl_estimator = kl;
      LossBatch batch = random_batch(6, 9);
      for (LossRow& row : batch.rows) {
        for (size_t t = 0; t < row.mask.size(); ++t) row.policy_weights.push_back(0.5f + 0.1f * t);
      }
      batch.run(config);
      const LossBatch at = batch;
      int num_checked = 0;
      for (size_t i = 0; i < at.rows.size(); ++i) {
        for (size_t t = 0; t < at.rows[i].mask.size(); ++t) {
          const double ratio = std::exp(at.rows[i].log_probs[t] - at.rows[i].old_log_probs[t]);
          // No difference quotient across a kink.
          if (std::abs(std::log(ratio / config.clip.low)) < 2 * kStep ||
              std::abs(std::log(ratio / config.clip.high)) < 2 * kStep) {
            continue;
          }
          batch.rows[i].log_probs[t] = at.rows[i].log_probs[t] + kStep;
          const double above = batch.run(config).loss;
          batch.rows[i].log_probs[t] = at.rows[i].log_probs[t] - kStep;
          const double below = batch.run(config).loss;
          batch.rows[i].log_probs[t] = at.rows[i].log_probs[t];
          // Error of the central difference: h²/6 of the third derivative, which is below 10.
          EXPECT_NEAR(at.rows[i].gradient[t], (above - below) / (2 * kStep), 2e-6);
          ++num_checked;
        }
      }
      EXPECT_GT(num_checked, 20);
    }
  }
}

// One completion of 30 tokens, r = 1, A = 1, of which 5 are masked and hold what would ruin a sum.
TEST(Losses, MaskedTokensLeaveNumeratorAndDenominator) {
  LossBatch batch;
  batch.rows.resize(1);
  LossRow& row = batch.rows[0];
  row.log_probs.assign(30, -1.0f);
  row.old_log_probs.assign(30, -1.0f);
  row.ref_log_probs.assign(30, -1.0f);
  row.mask.assign(30, 1);
  row.advantage = 1;
  for (size_t t = 25; t < 30; ++t) {
    row.mask[t] = 0;
    row.log_probs[t] = std::numeric_limits<float>::quiet_NaN();
    row.old_log_probs[t] = -std::numeric_limits<float>::infinity();
    row.ref_log_probs[t] = 200;
  }
  for (const LossType type : kAllTypes) {
    const bool fixed = type == LossType::kDrGrpo;
    const LossResult result = batch.run(config_of(type, 0.1));
    EXPECT_DOUBLE_EQ(result.loss, fixed ? -25.0 / 16 : -1.0);
    for (size_t t = 0; t < 30; ++t) {
      EXPECT_EQ(row.gradient[t],
                t >= 25 ? 0.0f : static_cast<float>(fixed ? -1.0 / 16 : -1 / 25.0));
    }
    EXPECT_EQ(result.metrics.num_tokens, 25);
  }
}

// A completion that is masked altogether, or empty, neither adds to the mean nor dilutes it.
TEST(Losses, DroppedCompletionsDoNotDilute) {
  LossBatch with = random_batch(6, 3);
  LossBatch without = with;
  without.rows.erase(without.rows.begin() + 1, without.rows.begin() + 3);
  for (const LossType type : {LossType::kGrpo, LossType::kBnpo, LossType::kDapo}) {
    EXPECT_EQ(with.run(config_of(type)).loss, without.run(config_of(type)).loss);
  }
  // Dr. GRPO divides by a constant: the number of completions sampled.
  EXPECT_NEAR(with.run(config_of(LossType::kDrGrpo)).loss * 6,
              without.run(config_of(LossType::kDrGrpo)).loss * 4, 1e-15);
}

TEST(Losses, NothingLeftIsSkipped) {
  LossBatch batch = random_batch(3, 4);
  for (LossRow& row : batch.rows) row.mask.assign(row.log_probs.size(), 0);
  const std::vector<CompletionTerms> terms = batch.terms();
  LossNormalizer normalizer;
  normalizer.add(terms);
  EXPECT_TRUE(normalizer.skipped());
  EXPECT_EQ(normalizer.num_completions, 3);
  EXPECT_TRUE(LossNormalizer{}.skipped());
  for (const LossType type : kAllTypes) {
    LossMetrics metrics;
    EXPECT_EQ(policy_loss(config_of(type, 0.1), normalizer, terms, &metrics), 0.0);
    EXPECT_TRUE(metrics.metrics().empty());  // absent, not 0
  }
  EXPECT_EQ(sft_loss(normalizer, terms, nullptr), 0.0);
  for (const LossRow& row : batch.rows) {
    for (const float value : row.gradient) EXPECT_EQ(value, 0.0f);
  }
}

TEST(Losses, HugeLogRatiosStayFinite) {
  for (const double advantage : {1.0, -1.0}) {
    for (const float log_ratio : {200.0f, -200.0f}) {
      LossBatch batch;
      batch.rows.resize(1);
      LossRow& row = batch.rows[0];
      row.advantage = advantage;
      row.log_probs = {-1.0f, log_ratio};
      row.old_log_probs = {-1.0f, 0.0f};
      row.ref_log_probs = {-1.0f, 0.0f};
      LossConfig config = config_of(LossType::kDapo, 0.1);
      const LossResult result = batch.run(config);
      const double ratio = std::exp(log_ratio > 0 ? 20.0 : -20.0);
      const double term = -std::min(ratio * advantage, std::clamp(ratio, 0.8, 1.28) * advantage);
      const double kl = log_ratio > 0 ? std::exp(-20.0) + 19 : std::exp(20.0) - 21;
      EXPECT_NEAR(result.loss, (-advantage + term + 0.1 * kl) / 2, 1e-6);
      EXPECT_EQ(row.gradient[0], static_cast<float>(-advantage / 2));
      EXPECT_EQ(row.gradient[1], 0.0f);  // beyond the clamp
      EXPECT_EQ(result.metrics.num_outliers, 1);
    }
  }
}

// A NaN that counts must reach the loss, where the guard sees it.
TEST(Losses, NanInsidePropagates) {
  LossBatch batch = random_batch(4, 8);
  batch.rows[0].mask.assign(batch.rows[0].mask.size(), 1);
  batch.rows[0].log_probs[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(batch.run(config_of(LossType::kDapo)).loss));
  EXPECT_TRUE(std::isnan(batch.rows[0].gradient[0]));
}

TEST(Losses, KlActsWithoutAnAdvantage) {
  LossBatch batch = random_batch(4, 12);
  for (LossRow& row : batch.rows) row.advantage = 0;
  EXPECT_EQ(batch.run(config_of(LossType::kGrpo)).loss, 0.0);
  EXPECT_GT(batch.run(config_of(LossType::kGrpo, 0.1)).loss, 0.0);
  EXPECT_NE(batch.rows[0].gradient[0], 0.0f);
}

TEST(Losses, WeightsActOnThePolicyTermOnly) {
  LossBatch batch = random_batch(4, 12);
  const LossResult plain = batch.run(config_of(LossType::kDapo, 0.1));
  for (LossRow& row : batch.rows) row.policy_weights.assign(row.log_probs.size(), 2.0f);
  const LossResult doubled = batch.run(config_of(LossType::kDapo, 0.1));
  EXPECT_NEAR(doubled.metrics.policy_loss, 2 * plain.metrics.policy_loss, 1e-14);
  EXPECT_EQ(doubled.metrics.kl_sum, plain.metrics.kl_sum);
  EXPECT_NEAR(doubled.loss, plain.loss + plain.metrics.policy_loss, 1e-14);
}

TEST(Losses, ClipSharesBySign) {
  LossBatch batch;
  batch.rows.resize(2);
  const std::vector<float> low = {std::log(0.7f), std::log(0.9f), std::log(1.5f), 0.0f};
  for (LossRow& row : batch.rows) {
    row.log_probs = low;
    row.old_log_probs.assign(4, 0.0f);
  }
  batch.rows[0].advantage = -1;
  batch.rows[1].advantage = 1;
  const MetricList metrics = batch.run(config_of(LossType::kDapo)).metrics.metrics();
  EXPECT_DOUBLE_EQ(metric(metrics, "clip_ratio/low_mean"), 1.0 / 8);
  EXPECT_DOUBLE_EQ(metric(metrics, "clip_ratio/high_mean"), 1.0 / 8);
  EXPECT_DOUBLE_EQ(metric(metrics, "clip_ratio/region_mean"), 2.0 / 8);
  EXPECT_DOUBLE_EQ(metric(metrics, "clip_ratio/low_negative"), 1.0 / 4);
  EXPECT_DOUBLE_EQ(metric(metrics, "clip_ratio/high_positive"), 1.0 / 4);
  EXPECT_NEAR(metric(metrics, "ratio/mean"), (0.7 + 0.9 + 1.5 + 1.0) / 4, 1e-6);
  EXPECT_NEAR(metric(metrics, "ratio/p50"), 0.9, 0.9 / 512);
  EXPECT_TRUE(std::isnan(metric(metrics, "kl")));  // absent: beta is 0
}

TEST(Losses, BadInputIsAnError) {
  LossBatch batch = random_batch(4, 2);
  EXPECT_THROW(parse_loss_type("drgrpo", "algorithm.loss_type"), UsageError);
  LossConfig config = config_of(LossType::kDrGrpo);
  config.max_completion_length = 0;
  EXPECT_THROW(batch.run(config), Error);
  batch.rows[0].old_log_probs.pop_back();
  EXPECT_THROW(batch.run(config_of(LossType::kGrpo)), Error);
  LossBatch other = random_batch(4, 2);
  LossNormalizer of_one;
  of_one.add(1, {});
  EXPECT_THROW(policy_loss(config_of(LossType::kGrpo), of_one, other.terms(), nullptr), Error);
}

}  // namespace
}  // namespace octet::rl
