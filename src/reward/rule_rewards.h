// The built-in rewards; users go through make_reward().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reward/reward.h"

namespace octet::reward {

// The options of one reward. finish() throws for a key that nobody asked for.
class Options {
 public:
  Options(std::string where, const Json& json);

  std::string text(const std::string& key, const std::string& fallback);
  double number(const std::string& key, double fallback);
  void finish() const;

 private:
  const Json* find(const std::string& key);
  std::string where_;
  const Json& json_;
  std::vector<std::string> known_;
};

using RewardFactory = std::unique_ptr<Reward> (*)(Options&);

struct RewardEntry {
  const char* name;
  RewardFactory make;
};

const std::vector<RewardEntry>& builtin_rewards();

}  // namespace octet::reward
