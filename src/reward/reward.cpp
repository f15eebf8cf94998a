#include "reward/reward.h"

#include <algorithm>
#include <cmath>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "reward/rule_rewards.h"

namespace octet::reward {
namespace {

std::string suggestion(std::string_view name, const std::vector<std::string>& known) {
  const std::string nearest = nearest_name(name, known);
  return nearest.empty() ? "" : fmt::format("; did you mean \"{}\"?", nearest);
}

}  // namespace

Options::Options(std::string where, const Json& json) : where_(std::move(where)), json_(json) {
  if (!json.is_object() && !json.is_null()) {
    fail_usage(where_, "options must be a table of keys, but are {}", json.type_name());
  }
}

const Json* Options::find(const std::string& key) {
  known_.push_back(key);
  return json_.is_object() && json_.contains(key) ? &json_.at(key) : nullptr;
}

std::string Options::text(const std::string& key, const std::string& fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) fail_usage(where_, "\"{}\" must be text", key);
  return value->get<std::string>();
}

double Options::number(const std::string& key, double fallback) {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) fail_usage(where_, "\"{}\" must be a number", key);
  return value->get<double>();
}

void Options::finish() const {
  if (!json_.is_object()) return;
  for (const auto& [key, value] : json_.items()) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
      fail_usage(where_, "the option \"{}\" is not known{}", key, suggestion(key, known_));
    }
  }
}

std::vector<std::string> reward_names() {
  std::vector<std::string> names;
  for (const RewardEntry& entry : builtin_rewards()) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Reward> make_reward(std::string_view name, const Json& options) {
  for (const RewardEntry& entry : builtin_rewards()) {
    if (name != entry.name) continue;
    Options reader(fmt::format("reward {}", name), options);
    std::unique_ptr<Reward> reward = entry.make(reader);
    reader.finish();
    return reward;
  }
  const std::vector<std::string> names = reward_names();
  fail_usage("reward.functions", "one of {} is required, but \"{}\" is given{}",
             fmt::join(names, ", "), name, suggestion(name, names));
}

std::vector<float> combine_rewards(std::span<const std::vector<float>> rewards,
                                   std::span<const double> weights) {
  if (!weights.empty() && weights.size() != rewards.size()) {
    fail("reward", "one weight per function is required, but there are {} for {} functions",
         weights.size(), rewards.size());
  }
  if (rewards.empty()) return {};
  std::vector<float> combined;
  for (size_t i = 0; i < rewards[0].size(); ++i) {
    double sum = 0;
    bool any = false;
    for (size_t f = 0; f < rewards.size(); ++f) {
      if (rewards[f].size() != rewards[0].size()) {
        fail("reward", "functions must score the same samples, but one gave {} and another {}",
             rewards[0].size(), rewards[f].size());
      }
      if (std::isnan(rewards[f][i])) continue;
      any = true;
      sum += (weights.empty() ? 1.0 : weights[f]) * static_cast<double>(rewards[f][i]);
    }
    combined.push_back(any ? static_cast<float>(sum) : kNoReward);
  }
  return combined;
}

}  // namespace octet::reward
