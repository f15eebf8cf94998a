#include "loop/setup.h"

#include <algorithm>
#include <filesystem>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "loop/task.h"
#include "rollout/engine.h"

namespace octet::loop {
namespace {

namespace fs = std::filesystem;

io::ModelConfig init_config(const ModelInit& init, int64_t vocab_size) {
  io::ModelConfig config;
  config.model_type = init.architecture;
  config.vocab_size = vocab_size;
  config.hidden_size = init.hidden_size;
  config.intermediate_size = init.intermediate_size;
  config.num_hidden_layers = init.num_hidden_layers;
  config.num_attention_heads = init.num_attention_heads;
  config.num_key_value_heads = init.num_key_value_heads;
  config.head_dim = init.head_dim;
  config.max_position_embeddings = init.max_position_embeddings;
  config.rms_norm_eps = init.rms_norm_eps;
  config.tie_word_embeddings = init.tie_word_embeddings;
  config.qk_norm = init.architecture == "qwen3";
  config.rope.theta = init.rope_theta;
  config.sliding_window.assign(static_cast<size_t>(init.num_hidden_layers), 0);
  return config;
}

std::optional<io::LoraConfig> lora_config(const TrainConfig& config) {
  if (!config.lora) return std::nullopt;
  io::LoraConfig lora;
  lora.r = config.lora->r;
  lora.lora_alpha = config.lora->lora_alpha;
  lora.use_rslora = config.lora->use_rslora;
  lora.target_modules = config.lora->target_modules;
  lora.base_model_name_or_path = config.model.path;
  return lora;
}

}  // namespace

bool calibrated(const TrainConfig& config) {
  return config.is_rl() && config.clip.mode == "calibrated" &&
         config.algorithm.num_iterations * config.train.mini_batches > 1;
}

ModelSource read_model_source(const TrainConfig& config) {
  ModelSource source;
  if (config.model.init) {
    const int64_t rows = ArithmeticTask::kEosId + 1;
    source.config = init_config(*config.model.init, rows);
    source.config.eos_token_ids = {ArithmeticTask::kEosId};
    source.config.pad_token_id = ArithmeticTask::kEosId;
    source.text_side.tokenizer =
        text::Tokenizer::from_json(ArithmeticTask::tokenizer_json(), "the task's tokenizer");
    source.text_side.stop_ids = {ArithmeticTask::kEosId};
  } else {
    source.config = io::read_model_config(config.model.path);
    source.text_side = read_text_side(config.model.path, source.config);
  }
  const std::string& file = config.data.chat_template;
  if (file == "none") {
    source.text_side.chat_template.reset();
  } else if (!file.empty()) {
    source.text_side.chat_template = text::ChatTemplate::parse(read_file(file), file);
  }
  return source;
}

model::Precision make_precision(const TrainConfig& config, const io::ModelConfig& model) {
  model::Precision precision;
  precision.flow = model::parse_flow(config.precision.flow);
  precision.float32 = config.model.dtype == "float32";
  if (precision.fp8()) {
    precision.scales = config.model.load_in_fp8 == "auto"
                           ? checkpoint_precision(model, precision).scales
                           : model::parse_weight_scales(config.model.load_in_fp8);
  }
  precision.tensor_activations = config.precision.activation_scale == "tensor";
  precision.dequantize_backward = config.precision.backward == "bf16";
  precision.gradient_format =
      config.precision.grad_format == "e5m2" ? tensor::DType::kE5M2 : tensor::DType::kE4M3;
  precision.scale_format = config.precision.scale_format == "pow2" ? tensor::ScaleFormat::kPow2
                                                                   : tensor::ScaleFormat::kF32;
  return precision;
}

PolicyOptions make_policy_options(const TrainConfig& config, const io::ModelConfig& model,
                                  int64_t num_known, int64_t memory_limit, ops::Backend* backend) {
  if (config.model.max_seq_length > model.max_position_embeddings) {
    fail_usage("model.max_seq_length",
               "must be at most {}, the model's max_position_embeddings, but "
               "is {}",
               model.max_position_embeddings, config.model.max_seq_length);
  }
  PolicyOptions options;
  options.precision = make_precision(config, model);
  options.fp8_kv = config.model.kv_cache_dtype == "fp8";
  options.training = config.lora ? model::Training::kLora : model::Training::kFull;
  options.lora = lora_config(config);
  options.shadow = calibrated(config);
  options.max_seq_length = config.model.max_seq_length;
  options.max_batch_tokens = std::max(config.train.micro_batch_tokens, config.model.max_seq_length);
  const int64_t samples =
      config.train.prompts_per_step * (config.is_rl() ? config.rollout.num_generations : 1);
  const int64_t running = std::max<int64_t>(1, std::min(config.rollout.max_num_seqs, samples));
  // A micro-batch may hold more, shorter sequences than the rollout runs at once.
  options.max_sequences = std::min(options.max_batch_tokens, std::max(running, samples));
  const int64_t least =
      std::max(options.max_batch_tokens + options.max_sequences * model::KvStore::kPageSize,
               2 * options.max_seq_length);
  const int64_t wanted = std::max(least, running * options.max_seq_length);

  if (memory_limit <= 0) {
    memory_limit = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE) / 2;
  }
  options.kv_tokens = least;
  const int64_t at_least = plan_total(plan_training(config, model, num_known, options, backend));
  options.kv_tokens = wanted;
  const int64_t at_most = plan_total(plan_training(config, model, num_known, options, backend));
  if (at_most > memory_limit) {
    const double per_token = wanted == least ? 0.0
                                             : static_cast<double>(at_most - at_least) /
                                                   static_cast<double>(wanted - least);
    const double extra =
        per_token > 0 ? static_cast<double>(memory_limit - at_least) / per_token : 0.0;
    options.kv_tokens =
        least + std::max<int64_t>(0, static_cast<int64_t>(extra) - 2 * model::KvStore::kPageSize);
  }
  return options;
}

PolicyOptions reference_options(const PolicyOptions& options) {
  PolicyOptions frozen = options;
  frozen.training = model::Training::kNone;
  frozen.shadow = false;
  frozen.kv_tokens = 2 * options.max_batch_tokens + options.max_seq_length +
                     options.max_sequences * model::KvStore::kPageSize;
  return frozen;
}

std::vector<PlanEntry> plan_training(const TrainConfig& config, const io::ModelConfig& model,
                                     int64_t num_known, const PolicyOptions& options,
                                     ops::Backend* backend) {
  tensor::PlanningAllocator allocator(backend == nullptr ? 1 : backend->allocator().page_bytes());
  Policy policy(allocator, model, num_known, options);
  const int64_t before = allocator.bytes_in_use();
  const train::AdamW optimizer(allocator, policy.model().weights(), {});
  const int64_t optimizer_bytes = allocator.bytes_in_use() - before;
  std::vector<PlanEntry> plan;
  for (const auto& entry : allocator.entries()) plan.push_back({entry.label, entry.num_bytes});
  plan.push_back({"sampling", rollout::Engine::num_bytes(policy.decoder(), policy.head())});
  int64_t later = optimizer_bytes;  // what is made after the weights have been filled
  if (backend != nullptr) {
    const ops::WorkspaceShape shape = workspace_shape(policy, options);
    for (const PlanEntry& entry : plan_workspaces(*backend, shape)) {
      plan.push_back(entry);
      later += entry.num_bytes;
    }
    plan_preparing(plan, *backend, shape);
  }
  const int64_t loading = allocator.whole_pages(model::loading_bytes(policy.model()));
  if (loading > later) plan.push_back({"loading", loading - later});
  if (config.is_rl() && config.algorithm.beta != 0 && !config.lora) {
    plan.push_back(
        {std::string(kReferenceLabel),
         plan_total(plan_memory(model, num_known, reference_options(options), backend))});
  }
  return plan;
}

PlanAdvice plan_advice(const PolicyOptions& options) {
  const model::Precision& precision = options.precision;
  PlanAdvice advice{
      .weights = "a smaller model",
      .reference = "algorithm.beta = 0, adapters (a [lora] section), whose base is the reference",
      .lengths = "a lower train.micro_batch_tokens, model.max_seq_length or train.prompts_per_step",
      .pages = {},
      .limit = "a higher run.device_memory_limit or another run.device"};
  if (precision.float32) {
    advice.weights += ", model.dtype = \"bf16\"";
  } else if (!options.lora) {
    advice.weights += ", adapters over frozen weights (a [lora] section)";
  } else if (!precision.fp8()) {
    advice.weights += ", model.load_in_fp8 with precision.flow = \"fp8_lora\"";
  }
  // Beside an FP8 pool the BF16 reference passes need one of their own.
  if (!precision.float32 && !options.fp8_kv && !options.shadow) {
    advice.pages = "model.kv_cache_dtype = \"fp8\"";
  }
  return advice;
}

train::TrainerOptions make_trainer_options(const TrainConfig& config, int64_t num_steps) {
  train::TrainerOptions options;
  options.sft = !config.is_rl();
  if (!options.sft)
    options.loss.type = rl::parse_loss_type(config.algorithm.loss_type, "algorithm.loss_type");
  options.loss.clip = rl::ClipBounds::from_epsilon(config.clip.epsilon, config.clip.epsilon_high);
  options.loss.beta = config.algorithm.beta;
  options.loss.max_completion_length = config.rollout.max_completion_length;
  options.num_iterations = options.sft ? 1 : config.algorithm.num_iterations;
  options.mini_batches = config.train.mini_batches;
  options.micro_batch_tokens = config.train.micro_batch_tokens;
  options.temperature = options.sft ? 1.0f : static_cast<float>(config.rollout.temperature);
  options.schedule = train::parse_schedule(config.optim.lr_scheduler_type);
  options.learning_rate = config.optim.learning_rate;
  options.warmup_updates = config.optim.warmup_steps;
  options.num_updates = num_steps * options.num_iterations * options.mini_batches;
  options.adamw = {config.optim.adam_beta1, config.optim.adam_beta2, config.optim.adam_epsilon,
                   config.optim.weight_decay, config.optim.max_grad_norm};
  if (calibrated(config)) {
    rl::CalibrationConfig calibration;
    calibration.interval = config.clip.calibration_interval;
    calibration.min_tail = config.clip.calibration_min_tail;
    calibration.reference = options.loss.clip;
    calibration.init = {config.clip.calibration_init[0], config.clip.calibration_init[1]};
    options.calibration = calibration;
  }
  return options;
}

std::vector<std::unique_ptr<reward::Reward>> make_rewards(const TrainConfig& config) {
  std::vector<std::unique_ptr<reward::Reward>> rewards;
  const std::string answer_field = config.data.task.empty() ? config.data.answer_field : "answer";
  for (const std::string& name : config.reward.functions) {
    Json options = Json::object();
    if (name == "regex") {
      options["pattern"] = config.reward.pattern;
    } else if (name == "length") {
      options["max_length"] = config.rollout.max_completion_length;
      options["cache"] = config.reward.soft_punish_cache;
    } else if (name != "format") {
      options["answer_field"] = answer_field;
    }
    rewards.push_back(reward::make_reward(name, options));
  }
  if (!config.reward.command.empty()) {
    rewards.push_back(std::make_unique<reward::ExternalCommand>(reward::ExternalCommandOptions{
        .command = config.reward.command,
        .timeout = std::chrono::milliseconds(static_cast<int64_t>(config.reward.timeout * 1000))}));
  }
  return rewards;
}

void fill_weights(ops::Backend& backend, const TrainConfig& config, model::Model& model) {
  if (config.model.init) {
    model::init_weights(backend, model, static_cast<uint64_t>(config.model.init->seed));
  } else {
    io::Checkpoint checkpoint(config.model.path);
    model::load_weights(backend, model, checkpoint);
  }
  if (config.lora) model::init_adapters(backend, model, static_cast<uint64_t>(config.run.seed));
}

void write_text_files(const TrainConfig& config, const ModelSource& source,
                      const std::string& folder) {
  const fs::path target(folder);
  if (config.model.init) {
    write_file_atomically((target / "tokenizer.json").string(), ArithmeticTask::tokenizer_json());
    write_file_atomically((target / "tokenizer_config.json").string(),
                          ArithmeticTask::tokenizer_config_json());
    io::GenerationConfig generation;
    generation.eos_token_ids = source.text_side.stop_ids;
    io::write_generation_config(folder, generation);
    return;
  }
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                           "generation_config.json", "special_tokens_map.json"}) {
    const fs::path file = fs::path(config.model.path) / name;
    if (fs::exists(file)) write_file_atomically((target / name).string(), read_file(file.string()));
  }
}

}  // namespace octet::loop
