// Advantages of the samples of a step, from their rewards and groups.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "rl/metric_list.h"

namespace octet::rl {

// What R_i − mean_group is divided by: std_group + 1e-4, std_batch + 1e-4 (GRPO, arXiv 2402.03300;
// sample standard deviations, n − 1), or nothing (Dr. GRPO, arXiv 2503.20783).
enum class ScaleRewards { kGroup, kBatch, kNone };

// "group", "batch", "none"; throws UsageError naming `where` otherwise.
ScaleRewards parse_scale_rewards(std::string_view name, std::string_view where);

struct AdvantageStats {
  int64_t num_samples = 0;
  int64_t num_missing_rewards = 0;  // NaN or infinite: left out of mean and deviation
  int64_t num_groups = 0;
  int64_t num_short_groups = 0;          // fewer than two rewards
  int64_t num_zero_variance_groups = 0;  // two or more rewards, all equal
  double reward_mean = 0;                // over all rewards; NaN where there is none
  // Mean of the group deviations over the groups with two or more rewards, as TRL reports it (the
  // deviation of the batch with kBatch); NaN where there is none.
  double reward_std = 0;

  // The share of zero-variance groups among those with two or more rewards; NaN where none.
  double frac_reward_zero_std() const;
  // `reward`, `reward_std`, `frac_reward_zero_std`.
  MetricList metrics() const;
};

struct Advantages {
  std::vector<double> values;  // one per sample; 0 for a missing reward, a short group, no variance
  AdvantageStats stats;
};

// `rewards[i]` belongs to the group `groups[i]` (any numbers; samples of a group need not be
// adjacent). Throws where the lengths differ.
Advantages group_advantages(std::span<const float> rewards, std::span<const int64_t> groups,
                            ScaleRewards scale);

}  // namespace octet::rl
