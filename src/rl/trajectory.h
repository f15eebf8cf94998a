// One sampled completion as plain data, from the rollout to the loss.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace octet::rl {

enum class FinishReason { kStop, kLength, kAborted };

// "stop", "length", "aborted".
constexpr const char* finish_reason_name(FinishReason reason) {
  return reason == FinishReason::kStop     ? "stop"
         : reason == FinishReason::kLength ? "length"
                                           : "aborted";
}

struct Trajectory {
  std::vector<int32_t> prompt_ids;
  std::vector<int32_t> completion_ids;    // [T]; the end token that stopped it is the last
  std::vector<float> sampling_log_probs;  // [T] log μ(y_t), nats, by the policy that sampled it
  int64_t group = 0;                      // index of the prompt in the step
  int64_t sample = 0;                     // index among the samples of the prompt
  float reward = std::numeric_limits<float>::quiet_NaN();  // NaN: no reward
  bool truncated = false;                                  // cut at the length limit, no end token
  uint64_t policy_version = 0;                             // of the weights that sampled it
  FinishReason finish_reason = FinishReason::kStop;
};

}  // namespace octet::rl
