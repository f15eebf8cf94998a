#include "loop/train_run.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/strings.h"
#include "loop/checkpoint.h"
#include "loop/run_folder.h"
#include "loop/run_identity.h"
#include "loop/run_report.h"
#include "loop/samples.h"
#include "loop/setup.h"
#include "model/scoring.h"
#include "observe/progress.h"
#include "observe/tensorboard.h"

namespace octet::loop {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t num_steps(const TrainConfig& config, int64_t num_train) {
  if (config.train.max_steps > 0) return config.train.max_steps;
  const double rows = config.train.num_train_epochs * static_cast<double>(num_train);
  return static_cast<int64_t>(std::ceil(rows / static_cast<double>(config.train.prompts_per_step)));
}

class TrainRun {
 public:
  TrainRun(ops::Backend& backend, const TrainConfig& config, const RunOptions& options);
  RunResult run();

 private:
  void set_up();
  void announce();
  void restore();
  RunResult take_steps();
  void tell(int64_t step, std::string_view kind, const std::string& message);
  observe::MetricList rl_step(int64_t step);
  observe::MetricList sft_step(int64_t step);
  void score_reference(std::span<train::TrainSample> samples);
  bool eval_due(int64_t steps_done) const;
  void evaluate_into(observe::MetricList& metrics);
  void save(int64_t steps_done);
  std::string export_result();
  void report_reward_failures(int64_t step);

  ops::Backend& backend_;
  const TrainConfig& config_;
  const RunOptions& options_;
  ModelSource source_;
  DataSource data_;
  int64_t num_known_;
  PolicyOptions policy_options_;
  Json provenance_;                 // of a resumed run, as it was started
  std::string provenance_problem_;  // why it could not be read
  std::optional<RunFolder> folder_;
  std::vector<std::unique_ptr<reward::Reward>> rewards_;
  std::optional<Policy> policy_;
  std::optional<Policy> reference_;  // a frozen copy, where KL needs one beside full fine-tuning
  std::optional<train::Trainer> trainer_;
  std::optional<rollout::Engine> engine_;
  std::optional<Sampler> sampler_;
  std::optional<observe::EventsFile> events_;
  std::optional<observe::Progress> progress_;
  int64_t num_steps_ = 0;
  int64_t first_step_ = 0;
  int64_t saved_step_ = -1;                        // of the newest checkpoint
  int64_t num_tokens_ = 0;                         // trained on, prompts included
  std::optional<observe::MetricList> unfinished_;  // of a step whose evaluation is still to come
  std::vector<int64_t> reported_failures_;         // by reward
  double rollout_seconds_ = 0, reward_seconds_ = 0, train_seconds_ = 0;
  std::vector<observe::CompletionRecord> last_records_;
};

TrainRun::TrainRun(ops::Backend& backend, const TrainConfig& config, const RunOptions& options)
    : backend_(backend),
      config_(config),
      options_(options),
      source_(read_model_source(config)),
      data_(config, source_.text_side),
      num_known_(source_.text_side.num_known(source_.config)),
      policy_options_(
          make_policy_options(config, source_.config, num_known_, options.memory_limit, &backend)),
      rewards_(make_rewards(config)) {
  check_plan(plan_training(config, source_.config, num_known_, policy_options_, &backend),
             options.memory_limit, plan_advice(policy_options_));
  num_steps_ = num_steps(config, data_.num_train());

  provenance_ = make_provenance(backend, config, source_, data_, num_steps_);
  if (options.resume) {
    folder_ = RunFolder::open(config.run.dir);
    check_same_run(config, folder_->config_path());
    const Json before = read_provenance(folder_->provenance_path(), provenance_problem_);
    check_same_inputs(provenance_, before);
    if (provenance_problem_.empty()) provenance_ = before;
  } else {
    folder_ = RunFolder::create(config.run.dir, print_config(config), provenance_);
  }
  try {
    set_up();
  } catch (...) {
    if (!options.resume) folder_->discard();
    throw;
  }
}

// Everything that may still fail before there is something to keep.
void TrainRun::set_up() {
  ops::Backend& backend = backend_;
  const TrainConfig& config = config_;
  prepare_backend(backend, source_.config, num_known_, policy_options_);
  policy_.emplace(backend.allocator(), source_.config, num_known_, policy_options_);
  fill_weights(backend, config, policy_->model());
  if (config.is_rl() && config.algorithm.beta != 0 && !config.lora) {
    reference_.emplace(backend.allocator(), source_.config, num_known_,
                       reference_options(policy_options_));
    fill_weights(backend, config, reference_->model());
  }
  trainer_.emplace(backend, policy_->model(),
                   train::Policy{policy_->decoder(), policy_->head(), policy_->pages()},
                   policy_->shadow_pages(), make_trainer_options(config, num_steps_));
  const text::Tokenizer* tokenizer =
      source_.text_side.tokenizer ? &*source_.text_side.tokenizer : nullptr;
  engine_.emplace(backend, policy_->decoder(), policy_->head(), policy_->pages(), tokenizer,
                  rollout::EngineOptions{.max_num_seqs = config.rollout.max_num_seqs});
  sampler_.emplace(config, source_.text_side, *engine_, rewards_);
  events_.emplace(folder_->events_path());
}

void TrainRun::restore() {
  std::vector<std::string> problems;
  const std::optional<CheckpointPlace> place = folder_->newest_whole_checkpoint(problems);
  if (!place && !problems.empty()) {
    fail(folder_->checkpoints_path(),
         "--resume needs a whole checkpoint, but none is: {}; bring one back, or remove the folder "
         "to start the run again",
         fmt::join(problems, "; "));
  }
  for (const std::string& problem : problems) tell(0, "checkpoint_damaged", problem);
  if (place) {
    if (place->step > num_steps_) {
      fail_usage(config_.run.dir,
                 "the run has taken {} steps, but {} steps are asked for; give a train.max_steps "
                 "of {} or more",
                 place->step, num_steps_, place->step);
    }
    saved_step_ = place->step;
    const Json extra = restore_state(backend_, policy_->model(), *trainer_, place->path);
    try {
      first_step_ = extra.at("steps_done").get<int64_t>();
      num_tokens_ = extra.at("num_tokens").get<int64_t>();
      if (extra.contains("unfinished")) {
        unfinished_.emplace();
        for (const Json& entry : extra["unfinished"]) {
          unfinished_->emplace_back(
              entry.at(0), entry.at(1).is_null() ? std::nan("") : entry.at(1).get<double>());
        }
      }
    } catch (const nlohmann::json::exception& error) {
      fail(place->path, "the run's counters are required, but: {}", error.what());
    }
  }
  folder_->drop_after(first_step_);
  folder_->write_config(print_config(config_));
  if (!provenance_problem_.empty()) {
    tell(first_step_, "provenance_damaged",
         provenance_problem_ + "; it is written again, from what the run reads now");
  }
  const std::string backend = backend_.name();
  if (const Json before = provenance_.value("backend", Json()); before != backend) {
    provenance_["resumed_on"] = backend;
    tell(first_step_, "backend_changed",
         fmt::format("the run was started on {} and goes on on \"{}\", so that its bytes differ "
                     "from those of a run that never stopped",
                     before.dump(), backend));
  }
  provenance_["num_steps"] = num_steps_;
  folder_->write_provenance(provenance_);
  if (place) {
    events_->write(first_step_, "resume", "continues from " + place->path);
  } else {
    tell(0, "resume", "there is no checkpoint; the run starts again");
  }
}

// A warning for the terminal and events.jsonl.
void TrainRun::tell(int64_t step, std::string_view kind, const std::string& message) {
  log_warning("{}", message);
  events_->write(step, kind, message);
}

RunResult TrainRun::run() {
  announce();
  try {
    return take_steps();
  } catch (const std::exception& error) {
    if (progress_) progress_->finish();
    log_warning("the run has failed; {}",
                saved_step_ < 0 ? "it has no checkpoint yet"
                                : fmt::format("once the cause below is gone, --resume "
                                              "continues from the checkpoint of step {}",
                                              saved_step_));
    try {
      events_->write(std::max<int64_t>(0, saved_step_), "failed", error.what());
    } catch (const Error&) {  // as where the disk is full: the first error is told
    }
    throw;
  }
}

void TrainRun::announce() {
  if (options_.resume) {
    restore();
  } else {
    events_->write(0, "start", fmt::format("{} steps on {}", num_steps_, backend_.name()));
    if (data_.num_left_out() + data_.num_eval_left_out() > 0) {
      tell(0, "rows_left_out",
           fmt::format("{} rows to train on and {} to evaluate on are longer than "
                       "max_prompt_length or max_seq_length and are left out",
                       data_.num_left_out(), data_.num_eval_left_out()));
    }
    if (config_.clip.mode == "calibrated" && !calibrated(config_)) {
      tell(0, "calibration_idle",
           "clip.mode = \"calibrated\" has nothing to do: with one update per rollout every ratio "
           "is 1; raise train.mini_batches or algorithm.num_iterations to use it");
    }
  }
}

RunResult TrainRun::take_steps() {
  RunResult result;
  result.dir = folder_->dir();
  // A run that starts, or starts again, writes its evaluation before the first step as step 0.
  if (first_step_ == 0 && eval_due(0)) unfinished_.emplace();
  const int64_t last_recorded = unfinished_ ? first_step_ - 1 : first_step_;
  observe::MetricsFile metrics_file(folder_->metrics_path(), last_recorded);
  std::optional<observe::TensorBoardWriter> tensorboard;
  for (const std::string& sink : config_.run.report_to) {
    if (sink != "tensorboard") continue;
    const int64_t first = options_.resume ? std::max<int64_t>(1, last_recorded + 1) : 0;
    tensorboard.emplace(folder_->tensorboard_path(), first);
  }
  const auto record = [&](int64_t step, const observe::MetricList& metrics) {
    metrics_file.write(step, metrics);
    if (tensorboard) tensorboard->scalars(step, metrics);
  };
  progress_.emplace(
      observe::ProgressOptions{.label = config_.is_rl() ? "grpo" : "sft",
                               .total = num_steps_,
                               .start = first_step_,
                               .terminal = options_.terminal,
                               .unicode = observe::locale_is_utf8(),
                               .lines_every = config_.train.logging_steps,
                               .columns = observe::stderr_columns(),
                               .write = options_.write ? options_.write : [](std::string_view) {},
                               .seconds = {}});
  const auto stop = [&](int64_t steps_done) {
    save(steps_done);
    events_->write(steps_done, "interrupted", "stopped on request");
    result.steps_done = steps_done;
    result.interrupted = true;
    progress_->finish();
    return result;
  };

  // Adds the evaluation where one is due and records the step; false where a request to stop came
  // in between. The step itself is whole then, and its evaluation is left for the resumed run.
  const auto finish = [&](int64_t steps_done, observe::MetricList& metrics) {
    unfinished_ = metrics;
    try {
      if (eval_due(steps_done)) evaluate_into(metrics);
    } catch (const Interrupted&) {
      return false;
    }
    unfinished_.reset();
    record(steps_done, metrics);
    return true;
  };

  if (unfinished_) {
    observe::MetricList metrics = *unfinished_;
    if (!finish(first_step_, metrics)) return stop(first_step_);
    if (first_step_ > 0) save(first_step_);  // without the unfinished evaluation
  }
  for (int64_t step = first_step_; step < num_steps_; ++step) {
    if (interrupted()) return stop(step);
    const int64_t done = step + 1;
    const double started = now_seconds();
    const int64_t tokens_before = num_tokens_;
    rollout_seconds_ = reward_seconds_ = train_seconds_ = 0;
    observe::MetricList metrics;
    try {
      metrics = config_.is_rl() ? rl_step(step) : sft_step(step);
    } catch (const Interrupted&) {
      return stop(step);  // the rollout gave up; no update has happened yet
    }
    const auto trained = static_cast<double>(config_.algorithm.num_iterations) *
                         static_cast<double>(num_tokens_ - tokens_before);
    metrics.emplace_back("num_tokens", static_cast<double>(num_tokens_));
    metrics.emplace_back("train_tokens_per_second", trained / train_seconds_);
    const double step_time = now_seconds() - started;
    metrics.emplace_back("step_time", step_time);
    if (config_.is_rl()) {
      metrics.emplace_back("time/rollout", rollout_seconds_ / step_time);
      metrics.emplace_back("time/reward", reward_seconds_ / step_time);
      metrics.emplace_back("time/train", train_seconds_ / step_time);
    }
    if (config_.is_rl() && config_.train.log_completions_steps > 0 &&
        (step % config_.train.log_completions_steps == 0 || done == num_steps_)) {
      observe::write_completions(folder_->completions_path(), done, last_records_);
    }
    if (!finish(done, metrics)) return stop(done);
    report_reward_failures(done);
    for (const std::string& message : skipped_updates(metrics)) {
      events_->write(done, "updates_skipped", message);
      progress_->message("warning: " + message);
    }
    progress_->update(done, progress_note(metrics, config_.is_rl()));
    if (step == 0 && config_.is_rl()) {
      progress_->message(
          "note: the policy loss starts near 0 because every ratio is 1 and advantages are "
          "centred; watch reward and grad_norm instead");
    }
    const bool save_due = config_.train.save_steps > 0 && done % config_.train.save_steps == 0;
    if (save_due || done == num_steps_) save(done);
  }
  progress_->finish();
  result.steps_done = num_steps_;
  result.export_dir = export_result();
  result.load_in_fp8 = config_.model.load_in_fp8;
  events_->write(num_steps_, "done", "the result is in " + result.export_dir);
  return result;
}

observe::MetricList TrainRun::rl_step(int64_t step) {
  std::vector<PromptRow> rows;
  for (int64_t i = 0; i < config_.train.prompts_per_step; ++i)
    rows.push_back(data_.prompt(step, i));
  std::vector<const PromptRow*> prompts;
  for (const PromptRow& row : rows) prompts.push_back(&row);

  const double started = now_seconds();
  SampleBatch batch = sampler_->rollout(prompts, step, {});
  reward_seconds_ = batch.reward_seconds;
  rollout_seconds_ = now_seconds() - started - reward_seconds_;
  if (config_.algorithm.beta != 0) score_reference(batch.samples);
  rl::MetricList updates = trainer_->step(batch.samples, step);
  train_seconds_ = now_seconds() - started - rollout_seconds_ - reward_seconds_;

  int64_t sampled = 0;
  for (const train::TrainSample& sample : batch.samples) {
    num_tokens_ += static_cast<int64_t>(sample.ids.size());
    sampled += sample.num_targets();
  }
  last_records_ = std::move(batch.records);
  observe::MetricList metrics = std::move(batch.metrics);
  metrics.insert(metrics.end(), updates.begin(), updates.end());
  metrics.emplace_back("rollout_tokens_per_second",
                       static_cast<double>(sampled) / rollout_seconds_);
  return metrics;
}

// log π_ref of every sample: the base without its adapters, or the frozen copy.
void TrainRun::score_reference(std::span<train::TrainSample> samples) {
  Policy& reference = reference_ ? *reference_ : *policy_;
  std::vector<model::ScoringRequest> requests;
  for (const train::TrainSample& sample : samples) {
    requests.push_back({sample.ids, sample.first_target});
  }
  std::vector<model::TokenScores> scores = model::score_sequences(
      backend_, reference.decoder(), reference.head(), reference.pages(), requests,
      static_cast<float>(config_.rollout.temperature), {.adapters = reference_.has_value()},
      config_.train.micro_batch_tokens);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].reference_log_probs = std::move(scores[i].log_probs);
  }
}

observe::MetricList TrainRun::sft_step(int64_t step) {
  std::vector<train::TrainSample> samples;
  for (int64_t i = 0; i < config_.train.prompts_per_step; ++i) {
    DemonstrationRow row = data_.demonstration(step, i);
    num_tokens_ += static_cast<int64_t>(row.ids.size());
    train::TrainSample& sample = samples.emplace_back();
    sample.ids = std::move(row.ids);
    sample.first_target = row.first_target;
  }
  const double started = now_seconds();
  observe::MetricList metrics = trainer_->step(samples, step);
  train_seconds_ = now_seconds() - started;
  return metrics;
}

bool TrainRun::eval_due(int64_t steps_done) const {
  const bool has_eval =
      rewards_.empty() ? !data_.eval_demonstrations().empty() : !data_.eval().empty();
  const int64_t every = config_.train.eval_steps;
  return has_eval &&
         (steps_done == 0 || steps_done == num_steps_ || (every > 0 && steps_done % every == 0));
}

void TrainRun::evaluate_into(observe::MetricList& metrics) {
  if (!rewards_.empty()) {
    const observe::MetricList evaluation = sampler_->evaluate(data_.eval());
    metrics.insert(metrics.end(), evaluation.begin(), evaluation.end());
    return;
  }
  std::vector<model::ScoringRequest> requests;
  for (const DemonstrationRow& row : data_.eval_demonstrations()) {
    requests.push_back({row.ids, row.first_target});
  }
  double sum = 0;
  int64_t count = 0;
  for (const model::TokenScores& scores :
       model::score_sequences(backend_, policy_->decoder(), policy_->head(), policy_->pages(),
                              requests, 1.0f, {}, config_.train.micro_batch_tokens)) {
    for (const float log_prob : scores.log_probs) sum -= log_prob;
    count += static_cast<int64_t>(scores.log_probs.size());
  }
  metrics.emplace_back("eval/loss", sum / static_cast<double>(count));
}

void TrainRun::save(int64_t steps_done) {
  Json extra = Json::object();
  extra["steps_done"] = steps_done;
  extra["num_tokens"] = num_tokens_;
  if (unfinished_) {
    extra["unfinished"] = Json::array();
    for (const auto& [name, value] : *unfinished_) extra["unfinished"].push_back({name, value});
  }
  folder_->save_checkpoint(steps_done, [&](const std::string& path) {
    save_state(backend_, policy_->model(), *trainer_, extra, path);
  });
  saved_step_ = steps_done;
  folder_->rotate_checkpoints(config_.train.save_total_limit);
  if (const std::string choices = backend_.choices(); !choices.empty()) {
    write_file_atomically(folder_->choices_path(), choices);
  }
}

std::string TrainRun::export_result() {
  const bool lora = config_.lora.has_value();
  return folder_->save_folder(lora ? "adapter" : "model", [&](const std::string& path) {
    if (lora) {
      model::save_adapters(backend_, policy_->model(), path);
    } else {
      model::save_weights(backend_, policy_->model(), path);
      write_text_files(config_, source_, path);
    }
  });
}

void TrainRun::report_reward_failures(int64_t step) {
  reported_failures_.resize(rewards_.size());
  for (size_t f = 0; f < rewards_.size(); ++f) {
    const auto& reward = rewards_[f];
    const reward::RewardFailures failures = reward->failures();
    if (failures.num_failed_samples <= reported_failures_[f]) continue;
    const std::string message =
        fmt::format("the reward {} left {} samples without a reward so far: {}", reward->name(),
                    failures.num_failed_samples, failures.last_reason);
    events_->write(step, "reward_failed", message);
    progress_->message("warning: " + message);
    reported_failures_[f] = failures.num_failed_samples;
    if (!failures.given_up) continue;
    save(step);
    fail("reward.command", "it must answer, but is {}; mend it, and continue with --resume",
         failures.last_reason);
  }
}

}  // namespace

RunResult run_training(ops::Backend& backend, const TrainConfig& config,
                       const RunOptions& options) {
  // What "auto" stands for is written down: the run's file holds no open choice.
  TrainConfig resolved = config;
  if (config.is_fp8() && config.model.load_in_fp8 == "auto") {
    resolved.model.load_in_fp8 =
        model::weight_scales_name(make_precision(config, read_model_source(config).config).scales);
  }
  TrainRun run(backend, resolved, options);
  return run.run();
}

}  // namespace octet::loop
