// Tiny training runs of the built program, and what they leave.
#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "system/program.h"

namespace octet::test {

// One-digit sums, a model of one layer, and a reward that random text earns at times.
inline const std::string kTinyConfig = R"(
[model]
max_seq_length = 16
[model.init]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 48
max_position_embeddings = 32
seed = 1
[data]
task = "arithmetic"
task_digits = 1
task_eval_size = 8
[reward]
functions = ["regex"]
pattern = "^[0-5]"
[rollout]
num_generations = 4
max_completion_length = 5
[algorithm]
loss_type = "grpo"
[train]
prompts_per_step = 4
mini_batches = 2
max_steps = 4
log_completions_steps = 1
save_total_limit = 0
[optim]
learning_rate = 1e-2
[run]
threads = 1
)";

// The same on the model in this folder, instead of random weights.
std::string tiny_config_on(const std::string& model);
// The folder of a model that such a run has made, once for the whole process.
const std::string& tiny_model();

inline const Arguments kSft = {"algorithm.name=sft", "algorithm.loss_type=sft"};
inline const Arguments kFp8Full = {"precision.flow=fp8_full", "model.kv_cache_dtype=fp8",
                                   "clip.calibration_interval=2", "clip.calibration_min_tail=1"};
// On a model with a path.
inline const Arguments kFp8Lora = {"precision.flow=fp8_lora", "lora.r=4"};

// A folder with tiny.toml in it, for runs in folders beside it.
class Trainer {
 public:
  explicit Trainer(const std::string& config = kTinyConfig);
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string config() const { return path("tiny.toml"); }

  // `octet train tiny.toml run.dir=RUN …`.
  Arguments command(const std::string& run, const Arguments& more = {}) const;
  Outcome train(const std::string& run, const Arguments& more = {}) const;
  // The same, which must end well; returns the run's folder.
  std::string trained(const std::string& run, const Arguments& more = {}) const;
  Outcome doctor(const Arguments& more = {}) const;

  // A script in this folder, as reward.command.
  Arguments reward_script(const std::string& name, const std::string& text) const;

 private:
  TemporaryFolder folder_;
};

std::vector<Json> read_lines(const std::string& path);
std::vector<Json> metrics_of(const std::string& run);
std::vector<double> values_of(const std::string& run, const std::string& metric);
// Whether events.jsonl has an event of this kind, with `word` in its message.
bool has_event(const std::string& run, const std::string& kind, const std::string& word = "");

// Weights, optimiser and calibration (the last checkpoint), samples, exported model, and metrics
// but times.
void expect_equal_runs(const std::string& a, const std::string& b);

void expect_message(const Outcome& outcome, int exit_code, const std::vector<std::string>& words);

// The program on its own, until it is waited for.
class RunningProgram {
 public:
  explicit RunningProgram(const Arguments& arguments);
  ~RunningProgram();
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  void signal(int number) const { kill(pid_, number); }
  // Whether `condition` became true while the program ran, within 20 s.
  bool wait_until(const std::function<bool()>& condition) const;
  Outcome wait();

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
};

// A copy of a golden model with a tokenizer of the printable ASCII characters, "<|im_end|>"
// (special) and the end token "<|end|>".
class TextModel {
 public:
  explicit TextModel(const std::string& golden = "models/qwen3-tiny",
                     const std::string& chat_template = "");
  std::string path() const { return folder_.path("model"); }

 private:
  TemporaryFolder folder_;
};

}  // namespace octet::test
