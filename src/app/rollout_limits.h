// The least time that a rollout of equal sequences can take on a device, from what must be read and
// multiplied, so that its speed can stand beside it. A step of T tokens takes at least
//   max(linear bytes / B, linear FLOPs / P + adapter FLOPs / P16)     the seven linears of all
//   layers
//   + max(head bytes / B, head FLOPs / P16)                           the output head's sampled
//   rows
//   + max(KV bytes / B, attention FLOPs / P16)                        keys and values
// with B the copy bandwidth, P the product peak of the linears' format and P16 that of BF16: within
// a step the three follow each other, and each can be as fast as the slower of its two needs. Bytes
// of a page that several samples share count once a step. Embedding, norms, sampling and the host
// count nothing. Prefill is in steps of `batch_tokens`; decoding takes one token of every running
// sequence a step, in waves where not all run at once.
#pragma once

#include <string>

#include "app/arguments.h"
#include "bench/device_limits.h"
#include "model/model.h"

namespace octet::app {

struct RolloutWork {
  int64_t prompts = 0, samples = 1;  // samples of each prompt
  int64_t prompt_tokens = 0, new_tokens = 0;
  int64_t batch_tokens = 0;   // of one step of prefill
  int64_t max_sequences = 0;  // running at once
  bool fp8_kv = false;
};

class RolloutLimits {
 public:
  RolloutLimits(const model::Model& model, const RolloutWork& work,
                const bench::DeviceLimits& device);

  double prefill_seconds() const;  // with the first token of every sample
  // Of the last `num_tokens` tokens of all.
  double decode_seconds(int64_t num_tokens) const;
  double seconds() const;  // of the whole call

  const RolloutWork& work() const { return work_; }
  const bench::DeviceLimits& device() const { return device_; }

 private:
  double step_seconds(double tokens, double sampled, double kv_tokens, double pairs) const;

  RolloutWork work_;
  bench::DeviceLimits device_;
  bool fp8_ = false;                                                // the linears
  double linear_bytes_ = 0, linear_flops_ = 0, adapter_flops_ = 0;  // FLOPs per token
  double head_bytes_ = 0, head_flops_ = 0;
  double kv_bytes_ = 0, pair_flops_ = 0;  // per token, per query and key; over all layers
};

// What one call was measured to take.
struct RolloutTimes {
  double start_seconds = 0, call_seconds = 0;
  double decode_seconds = 0;  // from the step after the last one with prompt tokens
  int64_t decode_tokens = 0;  // in that time
  int64_t steps = 0, preemptions = 0, peak_bytes = 0;
};

// A line on how near the limits the call was, and an object with every figure.
std::string describe(const RolloutLimits& limits, const RolloutTimes& times);
std::string json(const RolloutLimits& limits, const RolloutTimes& times,
                 const BenchArguments& arguments, const std::string& backend);

}  // namespace octet::app
