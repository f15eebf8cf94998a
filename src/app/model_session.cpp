#include "app/model_session.h"

#include <algorithm>
#include <functional>
#include <limits>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/random_weights.h"
#include "app/shapes.h"
#include "base/error.h"
#include "base/strings.h"
#include "loop/config.h"

namespace octet::app {
namespace {

constexpr BatchLimits kHostLimits{16, 2048}, kDeviceLimits{256, 8192};

bool is_float32(const ModelArguments& arguments) { return arguments.dtype == "float32"; }

void check_arguments(const ModelArguments& arguments) {
  if (arguments.model.empty() == arguments.shape.empty()) {
    fail_usage("--model", "give a model's folder, or --shape for random weights{}",
               arguments.model.empty() ? "" : ", not both");
  }
  if (arguments.dtype != "bf16" && arguments.dtype != "bfloat16" && !is_float32(arguments)) {
    fail_usage("--dtype", "must be bf16 or float32, but is \"{}\"", arguments.dtype);
  }
  if (arguments.kv_cache_dtype != "bf16" && arguments.kv_cache_dtype != "fp8") {
    fail_usage("--kv-cache-dtype", "must be bf16 or fp8, but is \"{}\"", arguments.kv_cache_dtype);
  }
  if (is_float32(arguments)) {
    if (!arguments.flow.empty() && arguments.flow != "bf16") {
      fail_usage("--dtype", "float32 rounds nothing, so it excludes --flow {}", arguments.flow);
    }
    if (arguments.kv_cache_dtype == "fp8") {
      fail_usage("--dtype", "float32 rounds nothing, so it excludes --kv-cache-dtype fp8");
    }
  }
  if (arguments.batch_size < 0 || arguments.batch_size > 4096) {
    fail_usage("--batch-size", "must be 1 to 4096, or 0 to choose, but is {}",
               arguments.batch_size);
  }
  if (arguments.max_seq_length < 0) {
    fail_usage("--max-seq-length", "must be positive, but is {}", arguments.max_seq_length);
  }
}

model::Precision choose_precision(const ModelArguments& arguments, const io::ModelConfig& config) {
  model::Precision precision;
  precision.float32 = is_float32(arguments);
  if (!precision.float32) precision = loop::checkpoint_precision(config, precision);
  if (!arguments.flow.empty()) precision.flow = model::parse_flow(arguments.flow);
  if (precision.fp8() && config.quantization && config.quantization->static_activations) {
    fail(arguments.model,
         "the checkpoint's static activation scales are not read; --flow bf16 "
         "dequantises its weights");
  }
  if (arguments.load_in_fp8.empty()) return precision;
  precision.scales = model::parse_weight_scales(arguments.load_in_fp8);
  if (!precision.fp8()) {
    fail_usage("--load-in-fp8", "\"{}\" needs an FP8 flow; add --flow fp8_lora or fp8_full",
               arguments.load_in_fp8);
  }
  return precision;
}

}  // namespace

void check_temperature(double temperature) {
  using loop::kLeastTemperature, loop::kMostTemperature;
  if (temperature == 0 || (temperature >= kLeastTemperature && temperature <= kMostTemperature)) {
    return;
  }
  fail_usage("--temperature", "must be 0, or {:.0e} to {:.0e}, but is {}", kLeastTemperature,
             kMostTemperature, temperature);
}

ModelSession::ModelSession(const ModelArguments& arguments) : arguments_(arguments) {
  check_arguments(arguments_);
  backend_ = make_backend(arguments_.device);
  config_ = arguments_.shape.empty() ? io::read_model_config(arguments_.model)
                                     : shape_named(arguments_.shape, 0);
  precision_ = choose_precision(arguments_, config_);
  if (arguments_.shape.empty()) text_ = loop::read_text_side(arguments_.model, config_);
  if (!arguments_.adapter.empty()) adapter_ = io::read_peft_adapter(arguments_.adapter);
  const int64_t made_for = config_.max_position_embeddings > 0
                               ? config_.max_position_embeddings
                               : std::numeric_limits<int32_t>::max();
  if (arguments_.max_seq_length > made_for) {
    fail_usage("--max-seq-length", "the model was made for {} positions, but {} are asked for",
               made_for, arguments_.max_seq_length);
  }
  max_positions_ = arguments_.max_seq_length > 0 ? arguments_.max_seq_length : made_for;
}

std::vector<Prompt> ModelSession::read_prompts(const InputArguments& input, bool special_tokens,
                                               bool add_generation_prompt) const {
  std::vector<Prompt> prompts;
  if (input.prompt_tokens != 0) {
    if (input.prompt_tokens < 1 || input.prompt_tokens > max_positions_ || input.num_prompts < 1) {
      fail_usage("--prompt-tokens", "must be 1 to {} for at least one prompt, but is {} for {}",
                 max_positions_, input.prompt_tokens, input.num_prompts);
    }
    if (!input.texts.empty() || !input.input.empty()) {
      fail_usage("--prompt-tokens", "random prompts stand instead of an input; give one of them");
    }
    for (auto& ids : random_prompts(input.num_prompts, input.prompt_tokens, config_.vocab_size)) {
      prompts.push_back({std::move(ids), fmt::format("prompt {}", prompts.size() + 1), {}});
    }
    return prompts;
  }
  for_each_line(input, [&](const std::string& line, const std::string& where) {
    try {
      prompts.push_back(read_prompt(line, where, special_tokens, add_generation_prompt));
    } catch (const Error& error) {
      prompts.push_back({{}, where, message_at(where, error)});
    }
  });
  return prompts;
}

Prompt ModelSession::read_prompt(const std::string& source, const std::string& where,
                                 bool special_tokens, bool add_generation_prompt) const {
  Line line(source, where, config_.vocab_size);
  Prompt prompt{{}, where, {}};
  const text::Tokenizer* tokenizer = text_.tokenizer ? &*text_.tokenizer : nullptr;
  if (line.kind == LineKind::kIds) {
    prompt.ids = std::move(line.ids);
  } else {
    if (tokenizer == nullptr) {
      fail(where, "a text needs a tokenizer, but the model's folder has none; give \"ids\"");
    }
    const bool conversation = line.kind == LineKind::kMessages;
    prompt.ids = tokenizer->encode(
        conversation
            ? render_line(line, tokenizer, text_.chat_template ? &*text_.chat_template : nullptr,
                          add_generation_prompt)
            : line.text,
        {.add_special_tokens = special_tokens && !conversation});
    for (const int32_t id : prompt.ids) {
      if (id < config_.vocab_size) continue;
      fail(where, "the tokenizer gave the id {}, but the model has only {} rows", id,
           config_.vocab_size);
    }
  }
  const auto length = static_cast<int64_t>(prompt.ids.size());
  if (length == 0) fail(where, "there must be at least one token, but there is none");
  if (length > max_positions_) {
    fail(where, "a sequence must have at most {} tokens ({}), but has {}", max_positions_,
         arguments_.max_seq_length > 0 ? "--max-seq-length" : "max_position_embeddings", length);
  }
  return prompt;
}

loop::PolicyOptions ModelSession::policy_options(std::span<const SequenceLength> lengths,
                                                 int64_t copies, const BatchLimits& most,
                                                 bool training) const {
  loop::PolicyOptions options;
  options.precision = precision_;
  options.fp8_kv = arguments_.kv_cache_dtype == "fp8";
  if (training) options.training = adapter_ ? model::Training::kLora : model::Training::kFull;
  if (adapter_) options.lora = adapter_->config;
  const int64_t longest = std::ranges::max(lengths, {}, &SequenceLength::total).total;
  options.max_seq_length = arguments_.max_seq_length > 0 ? arguments_.max_seq_length : longest;
  options.max_sequences = most.sequences;
  int64_t pages = 0;
  for (int64_t i = 0; i < most.sequences; ++i) {
    const SequenceLength& length = lengths[static_cast<size_t>(i / copies)];
    pages += model::KvStore::pages_for(length.total) -
             (most.shares && i % copies > 0 ? length.shared_pages() : 0);
  }
  options.kv_tokens =
      std::max(pages, model::KvStore::pages_for(longest)) * model::KvStore::kPageSize;
  // A training forward takes whole sequences.
  options.max_batch_tokens =
      std::max(training ? options.max_seq_length : 0, std::min(most.tokens, options.kv_tokens));
  return options;
}

std::vector<loop::PlanEntry> ModelSession::plan(const loop::PolicyOptions& options) const {
  const int64_t num_known = text_.num_known(config_);
  std::vector<loop::PlanEntry> plan =
      loop::plan_memory(config_, num_known, options, backend_.get());
  tensor::PlanningAllocator allocator;
  loop::Policy policy(allocator, config_, num_known, options);
  plan.push_back({"loading", arguments_.shape.empty() ? model::loading_bytes(policy.model())
                                                      : random_weights_bytes(policy.model())});
  return plan;
}

loop::PlanAdvice ModelSession::plan_advice(const loop::PolicyOptions& options) const {
  loop::PlanAdvice advice{.weights = "a smaller model",
                          .reference = {},
                          .lengths = arguments_.batch_size > 1
                                         ? "a lower --batch-size or --max-seq-length"
                                         : "a lower --max-seq-length",
                          .pages = {},
                          .limit = kMoreMemory};
  if (precision_.float32) {
    advice.weights += ", --dtype bf16";
  } else if (!precision_.fp8() && options.training != model::Training::kFull) {
    advice.weights += ", --load-in-fp8 channel with --flow fp8_lora";
  }
  if (!precision_.float32 && !options.fp8_kv) advice.pages = "--kv-cache-dtype fp8";
  return advice;
}

void ModelSession::load(std::vector<SequenceLength> lengths, int64_t copies, bool training) {
  const bool given = arguments_.batch_size > 0;
  BatchLimits most = uses_cuda(arguments_.device) ? kDeviceLimits : kHostLimits;
  if (given) most.sequences = arguments_.batch_size;
  most.sequences = std::min(most.sequences, static_cast<int64_t>(lengths.size()) * copies);
  const int64_t limit = memory_limit(arguments_.device);
  loop::PolicyOptions options;
  for (;;) {
    std::ranges::sort(lengths, std::greater(), [&](const SequenceLength& length) {
      return copies * model::KvStore::pages_for(length.total) -
             (most.shares ? (copies - 1) * length.shared_pages() : 0);
    });
    options = policy_options(lengths, copies, most, training);
    const std::vector<loop::PlanEntry> entries = plan(options);
    if (limit <= 0 || loop::plan_total(entries) <= limit) break;
    if (most.tokens > kHostLimits.tokens) {
      most.tokens = kHostLimits.tokens;
    } else if (copies > 1 && !most.shares) {
      most.shares = true;
    } else if (!given && most.sequences > 1) {
      most.sequences /= 2;
    } else {
      loop::check_plan(entries, limit, plan_advice(options));
    }
  }

  const int64_t num_known = text_.num_known(config_);
  loop::prepare_backend(*backend_, config_, num_known, options);
  policy_ = std::make_unique<loop::Policy>(backend_->allocator(), config_, num_known, options);
  if (arguments_.shape.empty()) {
    io::Checkpoint checkpoint(arguments_.model);
    model::load_weights(*backend_, policy_->model(), checkpoint);
  } else {
    fill_random_weights(*backend_, policy_->model());
  }
  if (adapter_) model::load_adapters(*backend_, policy_->model(), *adapter_);
}

}  // namespace octet::app
