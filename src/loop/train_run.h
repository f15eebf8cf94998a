// A training run from its config to its exported model: SFT, or rollout → reward → advantages →
// updates. It can be stopped between steps and continues to the same bytes.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "loop/config.h"
#include "ops/backend.h"

namespace octet::loop {

struct RunOptions {
  bool resume = false;
  int64_t memory_limit = 0;  // bytes the plan may use; 0: no limit
  // Terminal output (progress, notes); empty: silent.
  std::function<void(std::string_view)> write;
  bool terminal = false;
};

struct RunResult {
  std::string dir;
  std::string export_dir;   // the Hugging Face or PEFT folder, or "" where the run was stopped
  std::string load_in_fp8;  // of the config, with what "auto" stood for
  int64_t steps_done = 0;
  bool interrupted = false;  // a checkpoint was written; --resume continues
};

// Throws Error for whatever ends the job; a run folder then keeps its last whole checkpoint.
RunResult run_training(ops::Backend& backend, const TrainConfig& config, const RunOptions& options);

}  // namespace octet::loop
