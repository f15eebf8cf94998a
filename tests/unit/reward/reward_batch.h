// A batch that owns what RewardBatch borrows.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "reward/reward.h"

namespace octet::reward {

struct OwnedBatch {
  std::vector<std::string> prompts, completions;
  std::vector<std::vector<int32_t>> completion_ids;
  std::vector<Json> columns;

  void add(std::string completion, Json column = Json::object(), size_t num_tokens = 3) {
    prompts.push_back("question " + std::to_string(prompts.size()));
    completions.push_back(std::move(completion));
    completion_ids.emplace_back(num_tokens, 7);
    columns.push_back(std::move(column));
  }
  RewardBatch view() const { return {prompts, completions, completion_ids, columns}; }
};

}  // namespace octet::reward
