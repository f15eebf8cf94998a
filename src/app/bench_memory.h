// What `octet bench rollout` says about memory: the plan, what was taken, and whether calls give
// back what they take.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "loop/policy.h"

namespace octet::app {

// The plan of a policy with random weights and its engine.
std::vector<loop::PlanEntry> plan_rollout(ops::Backend& backend, const io::ModelConfig& config,
                                          const loop::PolicyOptions& options);

struct MemoryChecks {
  int64_t repeat = 1;  // calls in all, the first one done already
  bool remap = false;  // a call after the pool was unmapped and mapped again
};

struct MemoryVerdict {
  std::string text;  // lines of what was found, and the plan beside the peaks
  bool good = true;  // no growth, equal outputs
};

// `again` makes another call and says whether its output was the first one's, bit for bit.
MemoryVerdict check_memory(ops::Backend& backend, loop::Policy& policy,
                           const std::vector<loop::PlanEntry>& plan, const MemoryChecks& checks,
                           const std::function<bool()>& again);

}  // namespace octet::app
