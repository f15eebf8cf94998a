// What a training run is told: the schema of CONFIG.toml as plain data, read strictly.
// Meaning, type, default and origin of each key: docs/configuration.md, which is generated from the
// same table that drives the reader and the printer (config_keys.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace octet::loop {

// A JSON object as text; for keys that hold a free table.
struct JsonObject {
  std::string text = "{}";
  bool operator==(const JsonObject&) const = default;
};

// A new model with random weights instead of a checkpoint. The vocabulary comes from the data: the
// built-in task's tokenizer.
struct ModelInit {
  std::string architecture = "qwen3";
  int64_t hidden_size = 128;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 32;
  int64_t intermediate_size = 384;
  int64_t max_position_embeddings = 2048;
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = true;
  int64_t seed = 0;
  bool operator==(const ModelInit&) const = default;
};

struct ModelSection {
  std::string path;                  // a Hugging Face folder; empty: `init` is set
  std::string load_in_fp8 = "auto";  // "tensor" | "channel" | "block" | "false"; "auto": block, or
                                     // the checkpoint's own; resolved to "false" in flow bf16
  std::string kv_cache_dtype = "bf16";  // "bf16" | "fp8"
  int64_t max_seq_length = 2048;        // prompt and completion together
  std::string dtype = "bfloat16";       // "bfloat16" | "float32" (the oracle)
  std::optional<ModelInit> init;
  bool operator==(const ModelSection&) const = default;
};

struct PrecisionSection {
  std::string flow = "bf16";               // "bf16" | "fp8_lora" | "fp8_full"
  std::string activation_scale = "token";  // "token"
  std::string grad_format = "e4m3";        // "e4m3" | "e5m2"
  std::string scale_format = "fp32";       // "fp32" | "pow2"
  std::string backward = "fp8";            // "fp8" | "bf16": the input gradient in fp8_lora
  bool exact = true;
  bool operator==(const PrecisionSection&) const = default;
};

struct LoraSection {
  int64_t r = 16;
  double lora_alpha = 32;
  double lora_dropout = 0;
  std::vector<std::string> target_modules = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                             "gate_proj", "up_proj", "down_proj"};
  bool use_rslora = false;
  bool operator==(const LoraSection&) const = default;
};

// Either files (train, eval) or a built-in task.
struct DataSection {
  std::string train;
  std::string eval;
  std::string prompt_field = "prompt";
  std::string answer_field = "answer";
  std::string completion_field = "completion";  // SFT: the text to learn
  std::string system_prompt;
  std::string chat_template;  // a file; empty: the tokenizer's own
  JsonObject chat_template_kwargs;
  int64_t max_prompt_length = 0;  // tokens; longer prompts are left out; 0: no bound
  int64_t max_eval_samples = 0;   // 0: all
  bool shuffle = true;
  std::string task;               // "arithmetic", or empty
  int64_t task_digits = 2;        // of each operand
  double task_wrong_share = 0.6;  // of the SFT demonstrations
  int64_t task_eval_size = 256;   // problems held out of training
  int64_t task_seed = 0;          // decides which problems are held out
  bool operator==(const DataSection&) const = default;
};

struct RewardSection {
  std::vector<std::string> functions;
  std::vector<double> reward_weights;  // empty: 1 each
  std::string command;                 // run by /bin/sh -c; empty: none
  double timeout = 60;                 // seconds for one batch of the command
  std::string pattern;                 // of the reward "regex"
  int64_t soft_punish_cache = 0;       // tokens, of the reward "length"
  bool operator==(const RewardSection&) const = default;
};

// Beyond these float32 logits do not survive being divided.
inline constexpr double kLeastTemperature = 1e-6, kMostTemperature = 1e6;

struct RolloutSection {
  int64_t num_generations = 8;
  int64_t max_completion_length = 256;
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t top_k = 0;
  double min_p = 0.0;
  std::vector<std::string> stop;
  int64_t max_num_seqs = 256;
  bool operator==(const RolloutSection&) const = default;
};

struct AlgorithmSection {
  std::string name = "grpo";            // "sft" | "grpo"
  std::string loss_type = "dapo";       // "grpo" | "dapo" | "dr_grpo" | "bnpo"; resolved to "sft"
                                        // with name "sft"
  std::string scale_rewards = "group";  // "group" | "batch" | "none"
  double beta = 0;                      // of the KL term to the reference (k3)
  int64_t num_iterations = 1;
  bool mask_truncated_completions = false;
  bool completion_only_loss = true;  // SFT: the prompt's tokens are not learnt
  bool operator==(const AlgorithmSection&) const = default;
};

struct ClipSection {
  std::string mode;  // "fixed" | "calibrated"; never empty once read
  double epsilon = 0.2;
  double epsilon_high = 0;  // resolved from mode and loss_type where not given
  int64_t calibration_interval = 20;
  std::vector<double> calibration_init = {0.6, 1.8};  // {L, H}
  int64_t calibration_min_tail = 100;
  bool operator==(const ClipSection&) const = default;
};

// One step: RL: prompts_per_step × num_generations samples, then num_iterations × mini_batches
// optimiser updates; SFT: prompts_per_step sequences, then mini_batches updates.
struct TrainSection {
  int64_t prompts_per_step = 8;
  int64_t mini_batches = 1;
  int64_t micro_batch_tokens = 8192;   // of one forward and backward; a longer sequence goes alone
  int64_t max_steps = 0;               // 0: as num_train_epochs says
  double num_train_epochs = 3;         // used where max_steps is 0
  int64_t save_steps = 50;             // 0: only at the end
  int64_t save_total_limit = 3;        // 0: all are kept
  int64_t eval_steps = 0;              // 0: only at the start and the end
  int64_t logging_steps = 1;           // a line on the terminal; metrics.jsonl has every step
  int64_t log_completions_steps = 10;  // 0: none
  bool operator==(const TrainSection&) const = default;
};

struct OptimSection {
  std::string optim = "adamw";
  double learning_rate = 0;                  // resolved where not given: 1e-6, SFT 2e-5
  std::string lr_scheduler_type = "linear";  // "linear" | "cosine" | "constant" |
                                             // "constant_with_warmup"
  int64_t warmup_steps = 0;
  double weight_decay = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double max_grad_norm = 1.0;  // 0: no clipping
  bool operator==(const OptimSection&) const = default;
};

struct RunSection {
  std::string dir;  // resolved to runs/<name of the config file> where not given
  int64_t seed = 42;
  std::vector<std::string> report_to = {"tensorboard"};  // or empty
  std::string device = "auto";                           // "auto" | "cpu" | "cuda"
  int64_t threads = 0;                                   // 0: the processors it may use
  std::string cpu_isa = "auto";                          // "auto" | "portable" | "avx2" | "avx512"
  int64_t device_memory_limit = 0;                       // bytes; 0: what is free or there
  bool operator==(const RunSection&) const = default;
};

// Its rules are not available in this version; naming one is an error.
struct GuardSection {
  bool operator==(const GuardSection&) const = default;
};

struct TrainConfig {
  ModelSection model;
  PrecisionSection precision;
  std::optional<LoraSection> lora;
  DataSection data;
  RewardSection reward;
  RolloutSection rollout;
  AlgorithmSection algorithm;
  ClipSection clip;
  TrainSection train;
  OptimSection optim;
  RunSection run;
  GuardSection guard;
  bool operator==(const TrainConfig&) const = default;

  bool is_rl() const { return algorithm.name != "sft"; }
  bool is_fp8() const { return precision.flow != "bf16"; }
};

// Reads a config, applies `overrides` ("section.key=value", value in TOML syntax, a bare word is a
// string), resolves what depends on other keys and checks all of it. Throws UsageError naming the
// place (file and line, or the override), what was required and what was given; for an unknown key
// the nearest known one, or Octet's own name of a TRL, verl or Unsloth key. Paths stay as written.
TrainConfig read_config(const std::string& path, std::span<const std::string> overrides = {});

// The same from text; `where` names it in errors, and its stem names the default run.dir.
TrainConfig parse_config(std::string_view text, std::string_view where,
                         std::span<const std::string> overrides = {});

// The fully resolved file: parse_config of it gives an equal TrainConfig.
std::string print_config(const TrainConfig& config);

// docs/configuration.md.
std::string configuration_page();

}  // namespace octet::loop
