// From a config to what a run is made of.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "loop/config.h"
#include "loop/policy.h"
#include "reward/external_command.h"
#include "reward/reward.h"
#include "train/trainer.h"

namespace octet::loop {

// The model's shape and text side: of model.path's folder, or of model.init and the task's
// tokenizer.
struct ModelSource {
  io::ModelConfig config;
  TextSide text_side;
};
ModelSource read_model_source(const TrainConfig& config);

model::Precision make_precision(const TrainConfig& config, const io::ModelConfig& model);

// Sizes of the policy for this run. The page pool holds what max_num_seqs sequences may need, or as
// much as fits beside the rest under `memory_limit` (0: half of the machine's memory), at least one
// sequence and one micro-batch.
PolicyOptions make_policy_options(const TrainConfig& config, const io::ModelConfig& model,
                                  int64_t num_known, int64_t memory_limit,
                                  ops::Backend* backend = nullptr);

// Of the frozen copy that KL compares with in full fine-tuning: it scores a call's sequences at a
// time.
PolicyOptions reference_options(const PolicyOptions& options);

// The whole plan of a training run: policy, optimiser, reference model where KL needs one; given a
// backend, in its pages and with its workspaces.
std::vector<PlanEntry> plan_training(const TrainConfig& config, const io::ModelConfig& model,
                                     int64_t num_known, const PolicyOptions& options,
                                     ops::Backend* backend = nullptr);

// What helps where that does not fit.
PlanAdvice plan_advice(const PolicyOptions& options);

// Whether clip bounds are calibrated: asked for, and more than one update per rollout (with one,
// every ratio is 1 and there is nothing to clip).
bool calibrated(const TrainConfig& config);

train::TrainerOptions make_trainer_options(const TrainConfig& config, int64_t num_steps);

// The reward functions of the config, in order, the external command last.
std::vector<std::unique_ptr<reward::Reward>> make_rewards(const TrainConfig& config);

// Fills the weights: from model.path or from the seed of model.init, fresh adapters where asked
// for.
void fill_weights(ops::Backend& backend, const TrainConfig& config, model::Model& model);

// Copies tokenizer, chat template and generation config beside exported weights.
void write_text_files(const TrainConfig& config, const ModelSource& source,
                      const std::string& folder);

}  // namespace octet::loop
