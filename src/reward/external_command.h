// A reward computed by another program. It is started once by /bin/sh and speaks one JSON line per
// batch: {"prompts":[…],"completions":[…],"completion_ids":[[…]],"COLUMN":[…]} in,
// {"rewards":[number or null,…]} out. Its standard error passes through.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "reward/reward.h"

namespace octet::reward {

struct ExternalCommandOptions {
  std::string command;                        // for /bin/sh -c
  std::chrono::milliseconds timeout{60'000};  // for one batch, writing and reading together
  int max_restarts = 10;                      // in a row without a good answer; then it gives up
};

// Whatever goes wrong with the program leaves the samples concerned without a reward (NaN), is
// counted in failures(), and never throws. After a failed batch the program is stopped and started
// again for the next one. The destructor ends its whole process group.
class ExternalCommand final : public Reward {
 public:
  explicit ExternalCommand(ExternalCommandOptions options);
  ~ExternalCommand() override;

  std::string name() const override { return "command"; }
  std::vector<float> score(const RewardBatch& batch) override;
  RewardFailures failures() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace octet::reward
