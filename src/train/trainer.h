// One training step: the optimiser updates on the samples of one rollout, or on a batch of texts.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "rl/calibrated_clipping.h"
#include "rl/losses.h"
#include "train/adamw.h"
#include "train/learning_rate.h"
#include "train/micro_batch.h"

namespace octet::train {

struct TrainerOptions {
  bool sft = false;
  rl::LossConfig loss;  // clip bounds are the calibrator's where there is one
  int64_t num_iterations = 1;
  int64_t mini_batches = 1;
  int64_t micro_batch_tokens = 8192;
  float temperature = 1.0f;
  Schedule schedule = Schedule::kLinear;
  double learning_rate = 1e-6;
  int64_t warmup_updates = 0;
  int64_t num_updates = 1;  // of the whole run, for the schedule
  AdamWOptions adamw;
  std::optional<rl::CalibrationConfig> calibration;
};

class Trainer {
 public:
  // Everything is borrowed. `shadow_pages` (BF16) serves the reference passes of Calibrated
  // Clipping; it may be the policy's own pages, and null without calibration.
  Trainer(ops::Backend& backend, model::Model& model, const Policy& policy,
          model::KvStore* shadow_pages, const TrainerOptions& options);

  // The updates of step `step` (from 0) on samples in order: mini-batch m is the m-th of
  // `mini_batches` equal runs of them. Non-finite losses or gradients, and updates without a token,
  // change nothing and are counted. Metrics of all updates that were applied together.
  rl::MetricList step(std::span<const TrainSample> samples, int64_t step);

  AdamW& optimizer() { return optimizer_; }
  rl::ClipCalibrator* calibrator() { return calibrator_ ? &*calibrator_ : nullptr; }
  // Updates asked for so far: where the schedule stands.
  int64_t num_updates() const { return num_updates_; }
  void set_num_updates(int64_t updates) { num_updates_ = updates; }

 private:
  struct Measured;
  struct Tally;
  void update(std::span<const TrainSample> mini_batch, bool first, bool measure,
              std::span<const std::vector<float>> shadow_old, Tally& tally);
  std::vector<std::vector<float>> shadow_log_probs(std::span<const TrainSample> samples);
  void calibrate_with(std::span<const TrainSample> mini_batch,
                      std::span<const std::vector<float>> shadow_old,
                      std::span<const std::vector<float>> shadow_now,
                      std::span<const std::vector<float>> log_probs);

  ops::Backend& backend_;
  model::Model& model_;
  Policy policy_;
  model::KvStore* shadow_pages_;
  TrainerOptions options_;
  AdamW optimizer_;
  std::optional<rl::ClipCalibrator> calibrator_;
  int64_t num_updates_ = 0;
};

}  // namespace octet::train
