#include "rl/advantages.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "base/error.h"

namespace octet::rl {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Advantages of(std::vector<float> rewards, std::vector<int64_t> groups,
              ScaleRewards scale = ScaleRewards::kGroup) {
  return group_advantages(rewards, groups, scale);
}

TEST(Advantages, GroupByHand) {
  const Advantages result = of({1, 0, 0, 1, 3, 5}, {0, 0, 0, 0, 7, 7});
  const double std_first = std::sqrt(1.0 / 3);  // four values, deviations of ½, n − 1 = 3
  EXPECT_DOUBLE_EQ(result.values[0], 0.5 / (std_first + 1e-4));
  EXPECT_DOUBLE_EQ(result.values[1], -0.5 / (std_first + 1e-4));
  EXPECT_DOUBLE_EQ(result.values[4], -1 / (std::sqrt(2.0) + 1e-4));
  EXPECT_DOUBLE_EQ(result.values[5], 1 / (std::sqrt(2.0) + 1e-4));
  EXPECT_DOUBLE_EQ(result.stats.reward_mean, 10.0 / 6);
  EXPECT_DOUBLE_EQ(result.stats.reward_std, (std_first + std::sqrt(2.0)) / 2);
  EXPECT_EQ(result.stats.frac_reward_zero_std(), 0);
}

TEST(Advantages, GroupsNeedNotBeAdjacent) {
  const Advantages apart = of({1, 3, 0, 5}, {0, 1, 0, 1});
  const Advantages together = of({1, 0, 3, 5}, {0, 0, 1, 1});
  EXPECT_EQ(apart.values[0], together.values[0]);
  EXPECT_EQ(apart.values[1], together.values[2]);
}

TEST(Advantages, ScaleOfBatchAndNone) {
  const std::vector<float> rewards = {1, 0, 2, 5};
  const Advantages none = of(rewards, {0, 0, 1, 1}, ScaleRewards::kNone);
  EXPECT_EQ(none.values, (std::vector<double>{0.5, -0.5, -1.5, 1.5}));
  const Advantages batch = of(rewards, {0, 0, 1, 1}, ScaleRewards::kBatch);
  const double std_all = std::sqrt(14.0 / 3);  // mean 2: 1 + 4 + 0 + 9
  EXPECT_DOUBLE_EQ(batch.values[3], 1.5 / (std_all + 1e-4));
  EXPECT_DOUBLE_EQ(batch.stats.reward_std, std_all);
}

TEST(Advantages, MissingRewardsAreLeftOut) {
  const Advantages result = of({1, kNaN, 0, 0}, {0, 0, 0, 0});
  const double std_three = std::sqrt(1.0 / 3);
  EXPECT_DOUBLE_EQ(result.values[0], (2.0 / 3) / (std_three + 1e-4));
  EXPECT_EQ(result.values[1], 0);
  EXPECT_DOUBLE_EQ(result.values[2], (-1.0 / 3) / (std_three + 1e-4));
  EXPECT_EQ(result.stats.num_missing_rewards, 1);
  EXPECT_DOUBLE_EQ(result.stats.reward_mean, 1.0 / 3);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(of({1, infinity, 0, 0}, {0, 0, 0, 0}).values, result.values);
}

TEST(Advantages, AllMissing) {
  for (const ScaleRewards scale :
       {ScaleRewards::kGroup, ScaleRewards::kBatch, ScaleRewards::kNone}) {
    const Advantages result = of({kNaN, kNaN, kNaN}, {0, 0, 0}, scale);
    EXPECT_EQ(result.values, (std::vector<double>{0, 0, 0}));
    EXPECT_EQ(result.stats.num_short_groups, 1);
    EXPECT_TRUE(result.stats.metrics().empty());  // absent, not 0
  }
}

TEST(Advantages, FewerThanTwoRewards) {
  const Advantages result = of({4, kNaN, 2}, {0, 0, 1}, ScaleRewards::kNone);
  EXPECT_EQ(result.values, (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(result.stats.num_short_groups, 2);
  EXPECT_EQ(result.stats.num_zero_variance_groups, 0);
  EXPECT_DOUBLE_EQ(result.stats.reward_mean, 3);
  EXPECT_TRUE(of({}, {}).values.empty());
}

TEST(Advantages, ZeroVarianceIsCounted) {
  // The mean of three 0.1f is not 0.1f: a deviation computed from it would not be 0.
  const Advantages result = of({0.1f, 0.1f, 0.1f, 1, 0, 0.5f, 0.5f}, {0, 0, 0, 1, 1, 2, 2});
  for (const size_t i : {0, 1, 2, 5, 6}) EXPECT_EQ(result.values[i], 0);
  EXPECT_GT(result.values[3], 0);
  EXPECT_EQ(result.stats.num_zero_variance_groups, 2);
  EXPECT_DOUBLE_EQ(result.stats.frac_reward_zero_std(), 2.0 / 3);
}

TEST(Advantages, LengthsMustAgree) {
  EXPECT_THROW(of({1, 2}, {0}), Error);
  EXPECT_THROW(parse_scale_rewards("groups", "algorithm.scale_rewards"), UsageError);
  EXPECT_EQ(parse_scale_rewards("batch", ""), ScaleRewards::kBatch);
}

}  // namespace
}  // namespace octet::rl
