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

// A resumed run must be the run that was stopped, but for how long it goes and how it is watched.
void check_same_run(const TrainConfig& now, const std::string& config_path) {
  TrainConfig before = read_config(config_path);
  before.train.max_steps = now.train.max_steps;
  before.train.num_train_epochs = now.train.num_train_epochs;
  before.train.save_steps = now.train.save_steps;
  before.train.save_total_limit = now.train.save_total_limit;
  before.train.eval_steps = now.train.eval_steps;
  before.train.logging_steps = now.train.logging_steps;
  before.train.log_completions_steps = now.train.log_completions_steps;
  const int64_t seed = before.run.seed;
  before.run = now.run;
  before.run.seed = seed;
  if (before == now) return;
  const std::vector<std::string> a = split(print_config(before), '\n');
  const std::vector<std::string> b = split(print_config(now), '\n');
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    fail_usage(config_path,
               "a resumed run must keep its config, but \"{}\" has become \"{}\"; restore it "
               "or start a new run in another run.dir",
               trim(a[i]), trim(b[i]));
  }
  fail_usage(config_path, "a resumed run must keep its config, but sections were added or removed");
}

class TrainRun {
 public:
  TrainRun(ops::Backend& backend, const TrainConfig& config, const RunOptions& options);
  RunResult run();

 private:
  Json provenance() const;
  void restore();
  observe::MetricList rl_step(int64_t step);
  observe::MetricList sft_step(int64_t step);
  void score_reference(std::span<train::TrainSample> samples);
  bool eval_due(int64_t steps_done) const;
  void evaluate_into(observe::MetricList& metrics);
  void save(int64_t steps_done);
  std::string export_result();
  std::string note(const observe::MetricList& metrics) const;
  void report_reward_failures(int64_t step);

  ops::Backend& backend_;
  const TrainConfig& config_;
  const RunOptions& options_;
  ModelSource source_;
  DataSource data_;
  int64_t num_known_;
  PolicyOptions policy_options_;
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
  int64_t num_tokens_ = 0;  // trained on, prompts included
  int64_t reported_failures_ = 0;
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
          make_policy_options(config, source_.config, num_known_, options.memory_limit)),
      rewards_(make_rewards(config)) {
  check_plan(plan_training(config, source_.config, num_known_, policy_options_),
             options.memory_limit);
  num_steps_ = num_steps(config, data_.num_train());

  folder_ = options.resume ? RunFolder::open(config.run.dir)
                           : RunFolder::create(config.run.dir, print_config(config), provenance());
  if (options.resume) check_same_run(config, folder_->config_path());
  events_.emplace(folder_->events_path());

  policy_.emplace(backend.allocator(), source_.config, num_known_, policy_options_);
  fill_weights(backend, config, policy_->model());
  if (config.is_rl() && config.algorithm.beta != 0 && !config.lora) {
    PolicyOptions frozen = policy_options_;
    frozen.training = model::Training::kNone;
    frozen.shadow = false;
    reference_.emplace(backend.allocator(), source_.config, num_known_, frozen);
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
}

Json TrainRun::provenance() const {
  Json p = Json::object();
  p["octet_version"] = OCTET_VERSION;
  p["backend"] = backend_.name();
  p["flow"] = config_.precision.flow;
  p["load_in_fp8"] = config_.model.load_in_fp8;
  p["kv_cache_dtype"] = config_.model.kv_cache_dtype;
  p["model"] = {{"path", config_.model.path},
                {"model_type", source_.config.model_type},
                {"num_hidden_layers", source_.config.num_hidden_layers},
                {"hidden_size", source_.config.hidden_size},
                {"vocab_size", source_.config.vocab_size}};
  p["max_seq_length"] = config_.model.max_seq_length;
  p["batch"] = {{"prompts_per_step", config_.train.prompts_per_step},
                {"num_generations", config_.rollout.num_generations},
                {"mini_batches", config_.train.mini_batches},
                {"micro_batch_tokens", config_.train.micro_batch_tokens}};
  p["optim"] = config_.optim.optim;
  p["seed"] = config_.run.seed;
  p["data"] = data_.provenance();
  p["num_steps"] = num_steps_;
  return p;
}

void TrainRun::restore() {
  std::vector<std::string> problems;
  const std::optional<CheckpointPlace> place = folder_->newest_whole_checkpoint(problems);
  for (const std::string& problem : problems) {
    log_warning("{}", problem);
    events_->write(0, "checkpoint_damaged", problem);
  }
  if (place) {
    const Json extra = restore_state(backend_, policy_->model(), *trainer_, place->path);
    first_step_ = extra.at("steps_done").get<int64_t>();
    num_tokens_ = extra.at("num_tokens").get<int64_t>();
  }
  folder_->drop_after(first_step_);
  events_->write(first_step_, "resume",
                 place ? "continues from " + place->path
                       : "no whole checkpoint was found; the run starts again");
}

RunResult TrainRun::run() {
  RunResult result;
  result.dir = folder_->dir();
  if (options_.resume) {
    restore();
  } else {
    events_->write(0, "start", fmt::format("{} steps on {}", num_steps_, backend_.name()));
  }
  // A run that starts, or starts again, writes its evaluation before the first step as step 0.
  observe::MetricsFile metrics_file(folder_->metrics_path(), first_step_ > 0 ? first_step_ : -1);
  std::optional<observe::TensorBoardWriter> tensorboard;
  for (const std::string& sink : config_.run.report_to) {
    if (sink == "tensorboard") tensorboard.emplace(folder_->tensorboard_path(), first_step_);
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

  try {
    if (first_step_ == 0 && !data_.eval().empty() && !rewards_.empty()) {
      observe::MetricList metrics;
      evaluate_into(metrics);
      record(0, metrics);
    }
  } catch (const Interrupted&) {
    return stop(0);
  }
  for (int64_t step = first_step_; step < num_steps_; ++step) {
    if (interrupted()) return stop(step);
    const int64_t done = step + 1;
    const double started = now_seconds();
    rollout_seconds_ = reward_seconds_ = train_seconds_ = 0;
    observe::MetricList metrics;
    try {
      metrics = config_.is_rl() ? rl_step(step) : sft_step(step);
    } catch (const Interrupted&) {
      return stop(step);  // the rollout gave up; no update has happened yet
    }
    metrics.emplace_back("num_tokens", static_cast<double>(num_tokens_));
    const double step_time = now_seconds() - started;
    metrics.emplace_back("step_time", step_time);
    if (config_.is_rl()) {
      metrics.emplace_back("time/rollout", rollout_seconds_ / step_time);
      metrics.emplace_back("time/train", train_seconds_ / step_time);
    }
    try {
      if (eval_due(done)) evaluate_into(metrics);
    } catch (const Interrupted&) {
      // The step itself is whole; its evaluation is left out.
    }
    record(done, metrics);
    if (config_.is_rl() && config_.train.log_completions_steps > 0 &&
        (step % config_.train.log_completions_steps == 0 || done == num_steps_)) {
      observe::write_completions(folder_->completions_path(), done, last_records_);
    }
    report_reward_failures(done);
    progress_->update(done, note(metrics));
    if (step == 0 && config_.is_rl()) {
      progress_->message(
          "note: the policy loss starts near 0 because every ratio is 1 and advantages are "
          "centred; "
          "watch reward and grad_norm instead");
    }
    const bool save_due = config_.train.save_steps > 0 && done % config_.train.save_steps == 0;
    if (save_due || done == num_steps_) save(done);
  }
  progress_->finish();
  result.steps_done = num_steps_;
  result.export_dir = export_result();
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
  rollout_seconds_ = now_seconds() - started;
  if (config_.algorithm.beta != 0) score_reference(batch.samples);
  rl::MetricList updates = trainer_->step(batch.samples, step);
  train_seconds_ = now_seconds() - started - rollout_seconds_;

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
  return trainer_->step(samples, step);
}

bool TrainRun::eval_due(int64_t steps_done) const {
  if (data_.eval().empty() || rewards_.empty()) return false;
  const int64_t every = config_.train.eval_steps;
  return steps_done == num_steps_ || (every > 0 && steps_done % every == 0);
}

void TrainRun::evaluate_into(observe::MetricList& metrics) {
  const observe::MetricList evaluation = sampler_->evaluate(data_.eval());
  metrics.insert(metrics.end(), evaluation.begin(), evaluation.end());
}

void TrainRun::save(int64_t steps_done) {
  Json extra = Json::object();
  extra["steps_done"] = steps_done;
  extra["num_tokens"] = num_tokens_;
  folder_->save_checkpoint(steps_done, [&](const std::string& path) {
    save_state(backend_, policy_->model(), *trainer_, extra, path);
  });
  folder_->rotate_checkpoints(config_.train.save_total_limit);
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

std::string TrainRun::note(const observe::MetricList& metrics) const {
  std::string text;
  for (const auto& [name, label] : {std::pair{"reward", "reward"},
                                    {"loss", "loss"},
                                    {"entropy", "entropy"},
                                    {"grad_norm", "grad"},
                                    {"calibration/low", "L"},
                                    {"calibration/high", "H"},
                                    {"eval/reward", "eval"}}) {
    if (config_.is_rl() && std::string_view(name) == "loss") continue;
    for (const auto& [key, value] : metrics) {
      if (key == name) text += fmt::format("{}{} {:.3g}", text.empty() ? "" : "  ", label, value);
    }
  }
  return text;
}

void TrainRun::report_reward_failures(int64_t step) {
  for (const auto& reward : rewards_) {
    const reward::RewardFailures failures = reward->failures();
    if (failures.num_failed_samples <= reported_failures_) continue;
    const std::string message =
        fmt::format("the reward {} left {} samples without a reward so far: {}", reward->name(),
                    failures.num_failed_samples, failures.last_reason);
    events_->write(step, "reward_failed", message);
    progress_->message("warning: " + message);
    reported_failures_ = failures.num_failed_samples;
  }
}

}  // namespace

RunResult run_training(ops::Backend& backend, const TrainConfig& config,
                       const RunOptions& options) {
  TrainRun run(backend, config, options);
  return run.run();
}

}  // namespace octet::loop
