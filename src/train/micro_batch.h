// Cutting samples into micro-batches, and one micro-batch's forward and backward.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "model/decoder.h"
#include "model/output_head.h"

namespace octet::train {

// One sequence to train on: ids[first_target …] are the tokens of the loss.
struct TrainSample {
  std::vector<int32_t> ids;
  int64_t first_target = 1;
  double advantage = 0;
  std::vector<float> sampling_log_probs;   // [T] of the targets, as the rollout recorded them
  std::vector<float> reference_log_probs;  // [T], or empty without a KL term
  std::vector<uint8_t> mask;               // [T] 0: left out; empty: all count

  int64_t num_targets() const { return static_cast<int64_t>(ids.size()) - first_target; }
};

// Consecutive ranges [begin, end) of at most max_tokens ids and max_sequences samples; a longer
// sample goes alone.
std::vector<std::pair<size_t, size_t>> cut_micro_batches(std::span<const TrainSample> samples,
                                                         int64_t max_tokens, int64_t max_sequences);

struct Policy {
  model::Decoder& decoder;
  model::OutputHead& head;
  model::KvStore& pages;
};

// Runs the samples forward, hands their scores (one entry per sample) to `loss`, which fills the
// gradient by each log-probability ([sample][T], zero at first), and adds the parameters'
// gradients. Where `loss` returns false there is no backward.
using LossFunction = std::function<bool(std::span<const model::TokenScores> scores,
                                        std::span<std::vector<float>> gradients)>;
void train_micro_batch(ops::Backend& backend, const Policy& policy,
                       std::span<const TrainSample> samples, float temperature,
                       const LossFunction& loss);

}  // namespace octet::train
