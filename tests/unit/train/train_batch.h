// Samples as a rollout leaves them, for the tests of this folder.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

#include "rl/metric_list.h"
#include "support/tiny_policy.h"

namespace octet::train {

inline constexpr float kTemperature = 0.9f;

// Log-probabilities as the policy stands, or those of its base model or of its BF16 reference.
inline std::vector<std::vector<float>> log_probs_of(test::TinyPolicy& p,
                                                    std::span<const TrainSample> samples,
                                                    const model::ForwardMode& mode = {}) {
  std::vector<model::ScoringRequest> requests;
  for (const TrainSample& s : samples) requests.push_back({s.ids, s.first_target});
  std::vector<std::vector<float>> result;
  for (auto& scores : model::score_sequences(*p.backend, p.decoder, p.head, p.pages, requests,
                                             kTemperature, mode)) {
    result.push_back(std::move(scores.log_probs));
  }
  return result;
}

// Random completions of different lengths (the fourth is empty) with advantages of both signs,
// "sampled" by the policy itself.
inline std::vector<TrainSample> make_samples(test::TinyPolicy& p, size_t count = 8) {
  std::vector<TrainSample> samples;
  for (size_t i = 0; i < count; ++i) {
    TrainSample& s = samples.emplace_back();
    s.first_target = 2 + static_cast<int64_t>(i % 3) * 7;
    const int64_t length = i == 3 ? 0 : 4 + static_cast<int64_t>(5 * i % 23);
    s.ids = test::random_ids(s.first_target + length, static_cast<uint32_t>(i));
    s.advantage = (i % 2 == 0 ? 1.0 : -1.0) * (0.5 + 0.25 * static_cast<double>(i % 4));
  }
  const auto log_probs = log_probs_of(p, samples);
  for (size_t i = 0; i < count; ++i) samples[i].sampling_log_probs = log_probs[i];
  return samples;
}

inline std::optional<double> metric(const rl::MetricList& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return std::nullopt;
}

}  // namespace octet::train
