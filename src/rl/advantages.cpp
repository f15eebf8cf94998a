#include "rl/advantages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/strings.h"

namespace octet::rl {
namespace {

constexpr double kStdEpsilon = 1e-4;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? kNaN : sum / static_cast<double>(values.size());
}

// Sample standard deviation; NaN for fewer than two values.
double std_of(const std::vector<double>& values) {
  if (values.size() < 2) return kNaN;
  const double mean = mean_of(values);
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

}  // namespace

ScaleRewards parse_scale_rewards(std::string_view name, std::string_view where) {
  if (name == "group") return ScaleRewards::kGroup;
  if (name == "batch") return ScaleRewards::kBatch;
  if (name == "none") return ScaleRewards::kNone;
  fail_usage(where, "\"group\", \"batch\" or \"none\" is required, but \"{}\" is given", name);
}

double AdvantageStats::frac_reward_zero_std() const {
  const int64_t num_measured = num_groups - num_short_groups;
  return num_measured == 0
             ? kNaN
             : static_cast<double>(num_zero_variance_groups) / static_cast<double>(num_measured);
}

MetricList AdvantageStats::metrics() const {
  MetricList list;
  const auto add = [&](const char* name, double value) {
    if (!std::isnan(value)) list.emplace_back(name, value);
  };
  add("reward", reward_mean);
  add("reward_std", reward_std);
  add("frac_reward_zero_std", frac_reward_zero_std());
  return list;
}

Advantages group_advantages(std::span<const float> rewards, std::span<const int64_t> groups,
                            ScaleRewards scale) {
  if (rewards.size() != groups.size()) {
    fail("advantages", "one group per reward is required, but there are {} rewards and {} groups",
         rewards.size(), groups.size());
  }
  std::map<int64_t, std::vector<size_t>> members;  // those with a reward
  std::vector<double> all;
  for (size_t i = 0; i < rewards.size(); ++i) {
    std::vector<size_t>& group = members[groups[i]];
    if (!std::isfinite(rewards[i])) continue;
    group.push_back(i);
    all.push_back(rewards[i]);
  }

  Advantages result;
  result.values.assign(rewards.size(), 0.0);
  AdvantageStats& stats = result.stats;
  stats.num_samples = static_cast<int64_t>(rewards.size());
  stats.num_missing_rewards = static_cast<int64_t>(rewards.size() - all.size());
  stats.num_groups = static_cast<int64_t>(members.size());
  stats.reward_mean = mean_of(all);
  const double batch_std = std_of(all);

  std::vector<double> group_stds;
  for (const auto& [group, samples] : members) {
    if (samples.size() < 2) {
      ++stats.num_short_groups;
      continue;
    }
    std::vector<double> values;
    for (const size_t i : samples) values.push_back(rewards[i]);
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    if (*least == *most) {  // by comparison: a rounded mean would leave a deviation near 0
      ++stats.num_zero_variance_groups;
      group_stds.push_back(0);
      continue;
    }
    const double mean = mean_of(values);
    group_stds.push_back(std_of(values));
    const double divisor = scale == ScaleRewards::kGroup   ? group_stds.back() + kStdEpsilon
                           : scale == ScaleRewards::kBatch ? batch_std + kStdEpsilon
                                                           : 1.0;
    for (const size_t i : samples) result.values[i] = (rewards[i] - mean) / divisor;
  }
  stats.reward_std = scale == ScaleRewards::kBatch ? batch_std : mean_of(group_stds);
  return result;
}

}  // namespace octet::rl
