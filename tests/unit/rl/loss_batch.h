// A mini-batch that owns what CompletionTerms borrow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "rl/losses.h"

namespace octet::rl {

struct LossRow {
  std::vector<float> log_probs, old_log_probs, ref_log_probs, policy_weights;
  std::vector<uint8_t> mask;
  double advantage = 0;
  std::vector<float> gradient;
};

struct LossResult {
  double loss = 0;
  LossMetrics metrics;
};

struct LossBatch {
  std::vector<LossRow> rows;

  std::vector<CompletionTerms> terms() {
    std::vector<CompletionTerms> list;
    for (LossRow& row : rows) {
      row.gradient.assign(row.log_probs.size(), -1e9f);
      list.push_back({row.log_probs, row.old_log_probs, row.ref_log_probs, row.mask,
                      row.policy_weights, row.advantage, row.gradient});
    }
    return list;
  }

  // The batch cut into micro-batches of `micro_batch` completions, under one normaliser.
  LossResult run(const LossConfig& config, size_t micro_batch = SIZE_MAX) {
    const std::vector<CompletionTerms> list = terms();
    const std::span<const CompletionTerms> all(list);
    LossNormalizer normalizer;
    normalizer.add(all);
    LossResult result;
    for (size_t begin = 0; begin < all.size();) {
      const size_t count = std::min(micro_batch, all.size() - begin);
      LossMetrics part;
      result.loss += policy_loss(config, normalizer, all.subspan(begin, count), &part);
      result.metrics.add(part);
      begin += count;
    }
    return result;
  }
};

inline double metric(const MetricList& list, const std::string& name) {
  for (const auto& [key, value] : list) {
    if (key == name) return value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace octet::rl
