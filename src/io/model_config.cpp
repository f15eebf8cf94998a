#include "io/model_config.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "io/json_keys.h"

namespace octet::io {
namespace {

using tensor::Granularity;

std::string join_path(const std::string& folder, const char* name) {
  return (std::filesystem::path(folder) / name).string();
}

// v5 keeps everything in rope_parameters; v4 has rope_theta and, for scaling, rope_scaling.
RopeConfig read_rope(const JsonKeys& keys) {
  RopeConfig rope;
  const bool v5 = keys.has("rope_parameters");
  const std::string key = v5 ? "rope_parameters" : "rope_scaling";
  const std::optional<JsonKeys> fields = keys.find_object(key);
  rope.theta = keys.positive_or("rope_theta", rope.theta);
  if (keys.find_double("partial_rotary_factor").value_or(1.0) != 1.0) {
    keys.wrong("partial_rotary_factor", "1 (others are not supported)");
  }
  if (keys.find_bool("rope_interleaved").value_or(false)) {
    keys.wrong("rope_interleaved", "false (true is not supported)");
  }
  if (!fields.has_value()) return rope;
  for (const char* layer_type : {"full_attention", "sliding_attention"}) {
    if (fields->has(layer_type)) keys.wrong(key, "one for all layers (others are not supported)");
  }
  rope.theta = fields->positive_or("rope_theta", rope.theta);
  const char* type_key = fields->has("rope_type") ? "rope_type" : "type";
  const std::string type = fields->find_string(type_key).value_or("default");
  if (type == "linear") {
    rope.type = RopeType::kLinear;
    rope.factor = fields->get_positive("factor");
  } else if (type == "llama3") {
    rope.type = RopeType::kLlama3;
    rope.factor = fields->get_positive("factor");
    rope.low_freq_factor = fields->get_positive("low_freq_factor");
    rope.high_freq_factor = fields->get_positive("high_freq_factor");
    rope.original_max_position_embeddings = fields->get_size("original_max_position_embeddings");
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      fields->wrong("high_freq_factor", "above low_freq_factor");
    }
  } else if (type != "default") {
    fields->wrong(type_key, "\"default\", \"linear\" or \"llama3\" (others are not supported)");
  }
  return rope;
}

// Per layer: layer_types where given, else the rule of the family.
std::vector<int64_t> read_sliding_window(const JsonKeys& keys, const ModelConfig& config) {
  std::vector<int64_t> windows(static_cast<size_t>(config.num_hidden_layers), 0);
  if (config.model_type == "llama") return windows;
  const bool is_qwen = config.model_type != "mistral";
  if (!keys.has("sliding_window") ||
      (is_qwen && !keys.find_bool("use_sliding_window").value_or(false))) {
    return windows;
  }
  const int64_t window = keys.get_size("sliding_window");
  if (keys.has("layer_types")) {
    const std::vector<std::string> types = keys.find_strings("layer_types");
    if (types.size() != windows.size()) keys.wrong("layer_types", "one per layer");
    for (size_t i = 0; i < types.size(); ++i) {
      if (types[i] != "full_attention" && types[i] != "sliding_attention") {
        keys.wrong("layer_types", "full_attention or sliding_attention");
      }
      if (types[i] == "sliding_attention") windows[i] = window;
    }
    return windows;
  }
  const int64_t first =
      is_qwen ? std::max<int64_t>(0, keys.find_int("max_window_layers").value_or(0)) : 0;
  std::fill(windows.begin() + std::min(first, config.num_hidden_layers), windows.end(), window);
  return windows;
}

// One group of compressed-tensors: E4M3 weights and, unless null, E4M3 activations.
void read_scheme(const JsonKeys& group, QuantizationConfig& quantization) {
  const std::optional<JsonKeys> weights = group.find_object("weights");
  if (!weights.has_value()) group.wrong("weights", "an object");
  if (weights->find_int("num_bits") != 8 || weights->find_string("type") != "float") {
    group.wrong("weights", "of num_bits 8 and type \"float\" (others are not supported)");
  }
  const std::string strategy = weights->get_string("strategy");
  if (strategy == "block") {
    const Json* block = weights->find("block_structure");
    if (block == nullptr || *block != Json({128, 128})) {
      weights->wrong("block_structure", "[128, 128]");
    }
  }
  quantization.weights =
      strategy == "tensor"    ? Granularity::kTensor
      : strategy == "channel" ? Granularity::kRow
      : strategy == "block"
          ? Granularity::kBlock
          : (weights->wrong("strategy", "tensor, channel or block"), Granularity::kTensor);
  const std::optional<JsonKeys> inputs = group.find_object("input_activations");
  if (!inputs.has_value()) return;
  const std::string input_strategy = inputs->get_string("strategy");
  quantization.activations =
      input_strategy == "tensor"  ? Granularity::kTensor
      : input_strategy == "token" ? Granularity::kRow
      : input_strategy == "group"
          ? Granularity::kRowBlock
          : (inputs->wrong("strategy", "tensor, token or group"), Granularity::kTensor);
  if (input_strategy == "group" && inputs->find_int("group_size") != 128) {
    inputs->wrong("group_size", "128");
  }
  quantization.static_activations = !inputs->find_bool("dynamic").value_or(false);
}

std::optional<QuantizationConfig> read_quantization(const JsonKeys& keys) {
  const std::optional<JsonKeys> fields = keys.find_object("quantization_config");
  if (!fields.has_value()) return std::nullopt;
  QuantizationConfig quantization;
  quantization.method = fields->get_string("quant_method");
  if (quantization.method == "compressed-tensors") {
    const std::optional<JsonKeys> groups = fields->find_object("config_groups");
    const Json* object = fields->find("config_groups");
    if (!groups.has_value() || object->size() != 1) {
      fields->wrong("config_groups", "one group (several are not supported)");
    }
    read_scheme(*groups->find_object(object->begin().key()), quantization);
    quantization.ignore = fields->find_strings("ignore");
  } else if (quantization.method == "fp8") {
    if (fields->find_string("fmt").value_or("e4m3") != "e4m3") fields->wrong("fmt", "\"e4m3\"");
    const std::string scheme = fields->find_string("activation_scheme").value_or("dynamic");
    if (scheme != "dynamic" && scheme != "static") {
      fields->wrong("activation_scheme", "\"dynamic\" or \"static\"");
    }
    quantization.static_activations = scheme == "static";
    if (const Json* block = fields->find("weight_block_size"); block != nullptr) {
      if (*block != Json({128, 128})) fields->wrong("weight_block_size", "[128, 128]");
      quantization.weights = Granularity::kBlock;
      quantization.activations = Granularity::kRowBlock;
    }
    quantization.ignore = fields->find_strings("modules_to_not_convert");
    if (quantization.ignore.empty()) quantization.ignore = fields->find_strings("ignored_layers");
  } else {
    fields->wrong("quant_method", "\"compressed-tensors\" or \"fp8\" (others are not supported)");
  }
  return quantization;
}

void read_biases(const JsonKeys& keys, ModelConfig& config) {
  if (config.model_type == "qwen2") {
    config.attention_bias = true;  // hard-wired there, on q, k and v alone
  } else if (config.model_type != "mistral") {
    config.attention_bias = keys.find_bool("attention_bias").value_or(false);
    config.attention_output_bias = config.attention_bias;
  }
  if (config.model_type == "llama") config.mlp_bias = keys.find_bool("mlp_bias").value_or(false);
}

std::string read_dtype(const JsonKeys& keys) {
  std::string dtype = keys.find_string(keys.has("dtype") ? "dtype" : "torch_dtype").value_or("");
  if (dtype.starts_with("torch.")) dtype.erase(0, 6);
  return dtype.empty() ? "bfloat16" : dtype;
}

}  // namespace

ModelConfig read_model_config(const std::string& folder) {
  const std::string path = join_path(folder, "config.json");
  const Json json = read_json_file(path);
  const JsonKeys keys(json, path);
  ModelConfig config;
  config.model_type = keys.get_string("model_type");
  if (std::ranges::count(kModelTypes, config.model_type) == 0) {
    keys.wrong("model_type",
               fmt::format("one of {} (others are not supported)", fmt::join(kModelTypes, ", ")));
  }
  config.vocab_size = keys.get_size("vocab_size");
  config.hidden_size = keys.get_size("hidden_size");
  config.intermediate_size = keys.get_size("intermediate_size");
  config.num_hidden_layers = keys.get_size("num_hidden_layers");
  config.num_attention_heads = keys.get_size("num_attention_heads");
  config.num_key_value_heads = keys.size_or("num_key_value_heads", config.num_attention_heads);
  config.max_position_embeddings = keys.get_size("max_position_embeddings");
  config.rms_norm_eps = keys.positive_or("rms_norm_eps", config.rms_norm_eps);
  config.tie_word_embeddings = keys.find_bool("tie_word_embeddings").value_or(false);
  config.qk_norm = config.model_type == "qwen3";
  constexpr int64_t kMostLayers = 10'000;
  if (config.num_hidden_layers > kMostLayers) keys.wrong("num_hidden_layers", "at most 10000");
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    keys.wrong("num_key_value_heads",
               fmt::format("a divisor of num_attention_heads ({})", config.num_attention_heads));
  }
  if (!keys.has("head_dim") && config.hidden_size % config.num_attention_heads != 0) {
    keys.wrong("head_dim", "given where num_attention_heads does not divide hidden_size");
  }
  config.head_dim = keys.size_or("head_dim", config.hidden_size / config.num_attention_heads);
  if (config.head_dim % 2 != 0) {
    fail(path, "\"head_dim\" must be even, but is {}", config.head_dim);
  }
  config.hidden_act = keys.find_string("hidden_act").value_or(config.hidden_act);
  if (config.hidden_act != "silu") keys.wrong("hidden_act", "\"silu\" (others are not supported)");
  read_biases(keys, config);
  config.rope = read_rope(keys);
  config.sliding_window = read_sliding_window(keys, config);
  config.eos_token_ids = keys.find_ids("eos_token_id");
  if (const auto ids = keys.find_ids("bos_token_id"); !ids.empty()) config.bos_token_id = ids[0];
  if (const auto ids = keys.find_ids("pad_token_id"); !ids.empty()) config.pad_token_id = ids[0];
  config.dtype = read_dtype(keys);
  config.quantization = read_quantization(keys);
  return config;
}

GenerationConfig read_generation_config(const std::string& folder) {
  const std::string path = join_path(folder, "generation_config.json");
  GenerationConfig config;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return config;
  const Json json = read_json_file(path);
  const JsonKeys keys(json, path);
  config.eos_token_ids = keys.find_ids("eos_token_id");
  if (const auto ids = keys.find_ids("bos_token_id"); !ids.empty()) config.bos_token_id = ids[0];
  if (const auto ids = keys.find_ids("pad_token_id"); !ids.empty()) config.pad_token_id = ids[0];
  config.do_sample = keys.find_bool("do_sample");
  config.temperature = keys.find_double("temperature");
  config.top_p = keys.find_double("top_p");
  config.min_p = keys.find_double("min_p");
  config.repetition_penalty = keys.find_double("repetition_penalty");
  config.top_k = keys.find_int("top_k");
  return config;
}

std::vector<int32_t> stop_token_ids(const ModelConfig& model, const GenerationConfig& generation) {
  std::vector<int32_t> ids;
  for (const auto* source : {&generation.eos_token_ids, &model.eos_token_ids}) {
    for (const int32_t id : *source) {
      if (std::ranges::count(ids, id) == 0) ids.push_back(id);
    }
  }
  return ids;
}

}  // namespace octet::io
