#include "loop/config_keys.h"

#include <algorithm>

namespace octet::loop {
namespace {

#define AT(member) (+[](TrainConfig& c) -> decltype(c.member)& { return c.member; })
#define AT_INIT(member) \
  (+[](TrainConfig& c) -> decltype(c.model.init->member)& { return c.model.init->member; })
#define AT_LORA(member) \
  (+[](TrainConfig& c) -> decltype(c.lora->member)& { return c.lora->member; })

constexpr double kMostSteps = 1 << 30;  // a step's number is part of its random keys

Limits any() { return {}; }
Limits at_least(double min) { return {.min = min}; }
Limits above(double min) { return {.min = min, .above_min = true}; }
Limits between(double min, double max) { return {.min = min, .max = max}; }
Limits inside(double min, double max) {
  return {.min = min, .max = max, .above_min = true, .below_max = true};
}
Limits half_open(double min, double max) { return {.min = min, .max = max, .below_max = true}; }
Limits one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }

std::vector<Key> model_keys() {
  return {
      {"model.path", AT(model.path), "Octet",
       "Folder of a Hugging Face checkpoint. Either this or `model.init`.", any()},
      {"model.load_in_fp8",
       AT(model.load_in_fp8),
       "Unsloth",
       "Granularity of the FP8 weights. `true` is `\"channel\"`, as in Unsloth; `\"auto\"` is the "
       "checkpoint's own, else `\"block\"`; `false` goes with `flow = \"bf16\"` and is its "
       "default.",
       {.choices = {"auto", "tensor", "channel", "block", "false"}, .when_true = "channel"},
       "\"auto\", false in flow bf16"},
      {"model.kv_cache_dtype", AT(model.kv_cache_dtype), "vLLM",
       "What the KV cache holds, in rollout and training alike.", one_of({"bf16", "fp8"})},
      {"model.max_seq_length", AT(model.max_seq_length), "Unsloth",
       "Most tokens of a prompt and its completion together.", between(2, 1 << 24)},
      {"model.dtype", AT(model.dtype), "TRL",
       "Arithmetic outside FP8. `\"float32\"` is the oracle for tests: nothing is rounded.",
       one_of({"bfloat16", "float32"})},
      {"model.init.architecture", AT_INIT(architecture), "Octet", "The model's family.",
       one_of({"qwen3"})},
      {"model.init.hidden_size", AT_INIT(hidden_size), "Transformers",
       "Width of the residual stream.", between(8, 1 << 16)},
      {"model.init.num_hidden_layers", AT_INIT(num_hidden_layers), "Transformers", "Layers.",
       between(1, 1024)},
      {"model.init.num_attention_heads", AT_INIT(num_attention_heads), "Transformers",
       "Query heads.", between(1, 1024)},
      {"model.init.num_key_value_heads", AT_INIT(num_key_value_heads), "Transformers",
       "Key and value heads; divides the query heads.", between(1, 1024)},
      {"model.init.head_dim", AT_INIT(head_dim), "Transformers", "Width of a head; even.",
       between(2, 1024)},
      {"model.init.intermediate_size", AT_INIT(intermediate_size), "Transformers",
       "Width inside the MLP.", between(8, 1 << 18)},
      {"model.init.max_position_embeddings", AT_INIT(max_position_embeddings), "Transformers",
       "Positions the model is made for.", between(2, 1 << 24)},
      {"model.init.rope_theta", AT_INIT(rope_theta), "Transformers", "Base of the rotary angles.",
       above(0)},
      {"model.init.rms_norm_eps", AT_INIT(rms_norm_eps), "Transformers", "Epsilon of the norms.",
       inside(0, 1)},
      {"model.init.tie_word_embeddings", AT_INIT(tie_word_embeddings), "Transformers",
       "One matrix for the embedding and the head.", any()},
      {"model.init.seed", AT_INIT(seed), "Octet", "Of the random weights.", at_least(0)},
      {"precision.flow", AT(precision.flow), "Octet",
       "Where FP8 is used: nowhere; in rollout and training with frozen FP8 weights under LoRA; "
       "or everywhere.",
       one_of({"bf16", "fp8_lora", "fp8_full"})},
      {"precision.activation_scale", AT(precision.activation_scale), "Octet",
       "What shares an activation's scale: each token has its own.", one_of({"token"})},
      {"precision.grad_format", AT(precision.grad_format), "Octet",
       "Format of the output gradients in FP8 products.", one_of({"e4m3", "e5m2"})},
      {"precision.scale_format", AT(precision.scale_format), "Octet",
       "Scales as they come, or rounded up to powers of two.", one_of({"fp32", "pow2"})},
      {"precision.backward", AT(precision.backward), "Octet",
       "The input gradient of frozen weights in `fp8_lora`: by FP8, or by decoded weights.",
       one_of({"fp8", "bf16"})},
      {"precision.exact", AT(precision.exact), "Octet", "Rollout and training give the same bits.",
       any()},
      {"lora.r", AT_LORA(r), "PEFT", "Rank.", between(1, 4096)},
      {"lora.lora_alpha", AT_LORA(lora_alpha), "PEFT",
       "The adapter is scaled by alpha / r (by alpha / √r with `use_rslora`).", above(0)},
      {"lora.lora_dropout", AT_LORA(lora_dropout), "PEFT",
       "Must be 0: with dropout, rollout and training would be two policies.", half_open(0, 1)},
      {"lora.target_modules", AT_LORA(target_modules), "PEFT", "Which linears get an adapter.",
       one_of({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})},
      {"lora.use_rslora", AT_LORA(use_rslora), "PEFT", "Rank-stabilised scaling.", any()},
  };
}

std::vector<Key> data_keys() {
  return {
      {"data.train", AT(data.train), "Octet",
       "JSON Lines file to train on. Either this or `data.task`.", any()},
      {"data.eval", AT(data.eval), "Octet",
       "JSON Lines file to evaluate on: greedy answers and their reward; in SFT without a reward, "
       "the loss.",
       any()},
      {"data.prompt_field", AT(data.prompt_field), "Octet",
       "Column of the prompt: text, or a list of messages.", any()},
      {"data.answer_field", AT(data.answer_field), "Octet",
       "Column of the answer that the built-in rewards compare with.", any()},
      {"data.completion_field", AT(data.completion_field), "Octet",
       "Column of the text that SFT learns.", any()},
      {"data.system_prompt", AT(data.system_prompt), "Octet",
       "Put before each conversation that has no system message.", any()},
      {"data.chat_template", AT(data.chat_template), "vLLM",
       "File with a chat template, instead of the tokenizer's own.", any()},
      {"data.chat_template_kwargs", AT(data.chat_template_kwargs), "TRL",
       "Variables for the chat template, such as `{enable_thinking = false}`.", any()},
      {"data.max_prompt_length", AT(data.max_prompt_length), "TRL",
       "Longer prompts (in tokens) are left out; 0: no bound but `max_seq_length`.", at_least(0)},
      {"data.max_eval_samples", AT(data.max_eval_samples), "Transformers",
       "Evaluate on the first so many; 0: all.", at_least(0)},
      {"data.shuffle", AT(data.shuffle), "verl", "A new order in each epoch.", any()},
      {"data.task", AT(data.task), "Octet",
       "A built-in generator of problems instead of files; empty: none.",
       one_of({"", "arithmetic"})},
      {"data.task_digits", AT(data.task_digits), "Octet", "Most digits of an operand.",
       between(1, 3)},
      {"data.task_wrong_share", AT(data.task_wrong_share), "Octet",
       "Share of the SFT demonstrations whose answer is wrong.", between(0, 1)},
      {"data.task_eval_size", AT(data.task_eval_size), "Octet",
       "Problems held out of training, for evaluation.", at_least(0)},
      {"data.task_seed", AT(data.task_seed), "Octet", "Decides which problems are held out.",
       at_least(0)},
      {"reward.functions", AT(reward.functions), "Octet",
       "Built-in reward functions; their rewards are added up (docs/rewards.md).", any()},
      {"reward.reward_weights", AT(reward.reward_weights), "TRL",
       "One weight per function, then one for the command; empty: 1 each.", any()},
      {"reward.command", AT(reward.command), "Octet",
       "An external program, started once through /bin/sh; empty: none.", any()},
      {"reward.timeout", AT(reward.timeout), "Octet",
       "Seconds the command has for one batch; then its samples get no reward.",
       between(0.001, 1e6)},
      {"reward.pattern", AT(reward.pattern), "Octet", "Regular expression of the reward `regex`.",
       any()},
      {"reward.soft_punish_cache", AT(reward.soft_punish_cache), "TRL",
       "Tokens before `max_completion_length` over which the reward `length` falls from 0 to -1.",
       at_least(0)},
      {"rollout.num_generations", AT(rollout.num_generations), "TRL", "Samples per prompt.",
       between(1, 65536)},
      {"rollout.max_completion_length", AT(rollout.max_completion_length), "TRL",
       "Most tokens of a completion.", between(1, 1 << 24)},
      {"rollout.temperature", AT(rollout.temperature), "TRL",
       "Of sampling, and of the log-probabilities that are trained.",
       between(kLeastTemperature, kMostTemperature)},
      {"rollout.top_p",
       AT(rollout.top_p),
       "TRL",
       "Sample from the most likely ids that make up this share.",
       {.min = 0, .max = 1, .above_min = true}},
      {"rollout.top_k", AT(rollout.top_k), "TRL", "Sample from the k most likely ids; 0: from all.",
       between(0, 1 << 24)},
      {"rollout.min_p", AT(rollout.min_p), "TRL",
       "Leave out ids less likely than this share of the most likely one.", between(0, 1)},
      {"rollout.stop", AT(rollout.stop), "vLLM", "Texts that end a completion.", any()},
      {"rollout.max_num_seqs", AT(rollout.max_num_seqs), "vLLM",
       "Most sequences decoded at once; does not change a result.", between(1, 65536)},
  };
}

std::vector<Key> algorithm_keys() {
  return {
      {"algorithm.name", AT(algorithm.name), "Octet", "What kind of training.",
       one_of({"sft", "grpo"})},
      {"algorithm.loss_type", AT(algorithm.loss_type), "TRL", "The loss, within the kind.",
       one_of({"grpo", "dapo", "dr_grpo", "bnpo", "sft"}),
       "\"dapo\", \"sft\" with `name = \"sft\"`"},
      {"algorithm.scale_rewards", AT(algorithm.scale_rewards), "TRL",
       "What advantages are divided by: the standard deviation of the group, of the batch, or "
       "nothing.",
       one_of({"group", "batch", "none"}), "\"group\", \"none\" with `loss_type = \"dr_grpo\"`"},
      {"algorithm.beta", AT(algorithm.beta), "TRL",
       "Weight of the KL term (k3) to the starting policy; 0: no reference is kept.", at_least(0)},
      {"algorithm.num_iterations", AT(algorithm.num_iterations), "TRL",
       "Passes over the samples of a step.", between(1, 1024)},
      {"algorithm.mask_truncated_completions", AT(algorithm.mask_truncated_completions), "TRL",
       "Leave completions without an end token out of the loss.", any()},
      {"algorithm.completion_only_loss", AT(algorithm.completion_only_loss), "TRL",
       "SFT: learn the completion only, not the prompt.", any()},
      {"clip.mode", AT(clip.mode), "Octet",
       "`\"calibrated\"` moves the bounds so that FP8 clips what BF16 would.",
       one_of({"fixed", "calibrated"}), "\"calibrated\" for RL in an FP8 flow, else \"fixed\""},
      {"clip.epsilon", AT(clip.epsilon), "TRL",
       "Lower bound 1 - epsilon of the ratio (calibrated: of the BF16 reference).", inside(0, 1)},
      {"clip.epsilon_high", AT(clip.epsilon_high), "TRL",
       "Upper bound 1 + epsilon_high of the ratio (calibrated: of the BF16 reference).", above(0),
       "0.28 with `loss_type = \"dapo\"`, else 0.24 (calibrated) or `epsilon` (fixed)"},
      {"clip.calibration_interval", AT(clip.calibration_interval), "Octet",
       "Steps from one calibration to the next.", at_least(1)},
      {"clip.calibration_init", AT(clip.calibration_init), "Octet",
       "Where the FP8 bounds start: lower in [0.5, 0.9], upper in [1.2, 2].", any()},
      {"clip.calibration_min_tail", AT(clip.calibration_min_tail), "Octet",
       "Tokens below the lower bound that are pooled before the bounds move.", at_least(1)},
      {"train.prompts_per_step", AT(train.prompts_per_step), "Octet",
       "Prompts of one step; in SFT, sequences.", between(1, 1 << 24)},
      {"train.mini_batches", AT(train.mini_batches), "Octet",
       "Optimiser updates that share a step's samples (TRL: `steps_per_generation`).",
       between(1, 65536)},
      {"train.micro_batch_tokens", AT(train.micro_batch_tokens), "Octet",
       "Most tokens of one forward and backward; a longer sequence goes alone. A matter of memory, "
       "and of the rounding of sums.",
       between(1, 1 << 24)},
      {"train.max_steps", AT(train.max_steps), "TRL", "Steps; 0: as `num_train_epochs` says.",
       between(0, kMostSteps)},
      {"train.num_train_epochs",
       AT(train.num_train_epochs),
       "TRL",
       "Passes over the prompts, where `max_steps` is 0.",
       {.min = 0, .max = 1e6, .above_min = true}},
      {"train.save_steps", AT(train.save_steps), "TRL",
       "Steps from one checkpoint to the next; 0: only at the end.", at_least(0)},
      {"train.save_total_limit", AT(train.save_total_limit), "TRL",
       "Newest checkpoints to keep; 0: all.", at_least(0)},
      {"train.eval_steps", AT(train.eval_steps), "TRL",
       "Steps from one evaluation to the next; 0: only at the start and the end.", at_least(0)},
      {"train.logging_steps", AT(train.logging_steps), "TRL",
       "Steps from one line on a plain terminal to the next; `metrics.jsonl` has every step.",
       at_least(1)},
      {"train.log_completions_steps", AT(train.log_completions_steps), "Octet",
       "Steps from one file of samples to the next; 0: none.", at_least(0)},
  };
}

std::vector<Key> run_keys() {
  return {
      {"optim.optim", AT(optim.optim), "TRL", "The optimiser.", one_of({"adamw"})},
      {"optim.learning_rate", AT(optim.learning_rate), "TRL", "Largest learning rate.", at_least(0),
       "1e-6, 2e-5 in SFT"},
      {"optim.lr_scheduler_type", AT(optim.lr_scheduler_type), "TRL",
       "How the rate goes over the updates; all but `\"constant\"` warm up first.",
       one_of({"linear", "cosine", "constant", "constant_with_warmup"})},
      {"optim.warmup_steps", AT(optim.warmup_steps), "TRL",
       "Optimiser updates over which the rate rises from 0.", between(0, kMostSteps)},
      {"optim.weight_decay", AT(optim.weight_decay), "TRL", "Decoupled decay.", between(0, 1)},
      {"optim.adam_beta1", AT(optim.adam_beta1), "TRL", "Decay of the first moment.",
       half_open(0, 1)},
      {"optim.adam_beta2", AT(optim.adam_beta2), "TRL", "Decay of the second moment.",
       half_open(0, 1)},
      {"optim.adam_epsilon", AT(optim.adam_epsilon), "TRL", "Added to the root.", above(0)},
      {"optim.max_grad_norm", AT(optim.max_grad_norm), "TRL",
       "Gradients are scaled down to this norm; 0: never.", at_least(0)},
      {"run.dir", AT(run.dir), "Octet", "The run's folder.", any(),
       "\"runs/NAME\", NAME from the config's file name"},
      {"run.seed", AT(run.seed), "TRL", "Of sampling, shuffling and adapters.", at_least(0)},
      {"run.report_to", AT(run.report_to), "TRL",
       "Beside `metrics.jsonl`, which is always written.", one_of({"tensorboard", "none"})},
      {"run.device", AT(run.device), "Octet",
       "Where it runs; `\"auto\"` takes a GPU if there is one.", one_of({"auto", "cpu", "cuda"})},
      {"run.threads", AT(run.threads), "Octet",
       "CPU threads, 0: the processors it may use; does not change a result.", between(0, 1024)},
      {"run.cpu_isa", AT(run.cpu_isa), "Octet",
       "Instruction set of the CPU kernels; part of what makes two runs equal.",
       one_of({"auto", "portable", "avx2", "avx512"})},
      {"run.device_memory_limit",
       AT(run.device_memory_limit),
       "Octet",
       "Memory the run may use, such as `\"5GiB\"`; 0: what is free on a GPU, what the machine has "
       "on a CPU.",
       {.min = 0, .is_bytes = true}},
  };
}

#undef AT
#undef AT_INIT
#undef AT_LORA

std::vector<Key> all_keys() {
  std::vector<Key> keys;
  for (auto part : {model_keys(), data_keys(), algorithm_keys(), run_keys()}) {
    keys.insert(keys.end(), part.begin(), part.end());
  }
  return keys;
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = all_keys();
  return keys;
}

const std::vector<Section>& config_sections() {
  static const std::vector<Section> sections = {
      {"model", "The policy."},
      {"model.init",
       "A new model with random weights, instead of `model.path`; also as an inline table "
       "`init = {…}` in `[model]`. It goes with `data.task`, which brings the vocabulary."},
      {"precision", "Where FP8 is used, and how."},
      {"lora", "Leave the section out for full fine-tuning."},
      {"data", "Prompts, from files or from a built-in task."},
      {"reward", "What a completion is worth."},
      {"rollout", "How completions are sampled. Evaluation is greedy."},
      {"algorithm", "What is learnt from them."},
      {"clip", "Bounds of the ratio between the trained and the sampling policy."},
      {"train",
       "One step is one rollout of `prompts_per_step × num_generations` samples and then "
       "`num_iterations × mini_batches` optimiser updates on them. In SFT it is `prompts_per_step` "
       "sequences and `mini_batches` updates."},
      {"optim", "The optimiser."},
      {"run", "The run's folder, seed and device."},
      {"guard", "Rules that stop a run or roll it back. Not in this version."},
  };
  return sections;
}

std::string section_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return std::string(name.substr(0, dot == std::string_view::npos ? 0 : dot));
}

std::string bare_name(std::string_view name) {
  const size_t dot = name.rfind('.');
  return std::string(dot == std::string_view::npos ? name : name.substr(dot + 1));
}

const Key* find_key(std::string_view name) {
  const auto& keys = config_keys();
  const auto found = std::ranges::find(keys, name, &Key::name);
  return found == keys.end() ? nullptr : &*found;
}

bool is_section(std::string_view name) {
  const auto& sections = config_sections();
  return std::ranges::find(sections, name, &Section::name) != sections.end();
}

void make_section(TrainConfig& config, std::string_view section) {
  if (section == "model.init" && !config.model.init) config.model.init.emplace();
  if (section == "lora" && !config.lora) config.lora.emplace();
}

bool has_section(const TrainConfig& config, std::string_view section) {
  if (section == "model.init") return config.model.init.has_value();
  if (section == "lora") return config.lora.has_value();
  return true;
}

}  // namespace octet::loop
