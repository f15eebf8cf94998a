#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "io/model_config.h"

namespace octet::io {
namespace {

void write_json(const std::string& folder, const char* name, const Json& json) {
  write_file_atomically((std::filesystem::path(folder) / name).string(), json.dump(2) + "\n");
}

// One id as a number, several as a list, none as null.
Json ids_json(const std::vector<int32_t>& ids) {
  if (ids.empty()) return nullptr;
  return ids.size() == 1 ? Json(ids[0]) : Json(ids);
}

Json id_json(int32_t id) { return id < 0 ? Json(nullptr) : Json(id); }

Json rope_scaling_json(const RopeConfig& rope) {
  switch (rope.type) {
    case RopeType::kDefault:
      return nullptr;
    case RopeType::kLinear:
      return {{"rope_type", "linear"}, {"factor", rope.factor}};
    case RopeType::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", rope.factor},
              {"low_freq_factor", rope.low_freq_factor},
              {"high_freq_factor", rope.high_freq_factor},
              {"original_max_position_embeddings", rope.original_max_position_embeddings}};
  }
  return nullptr;
}

const char* architecture_name(const std::string& model_type) {
  if (model_type == "llama") return "LlamaForCausalLM";
  if (model_type == "mistral") return "MistralForCausalLM";
  if (model_type == "qwen2") return "Qwen2ForCausalLM";
  return "Qwen3ForCausalLM";
}

void add_sliding_window(const ModelConfig& config, const std::string& path, Json& json) {
  if (config.model_type == "llama") return;
  const auto& windows = config.sliding_window;
  const auto first = std::ranges::find_if(windows, [](int64_t window) { return window > 0; });
  const int64_t window = first == windows.end() ? 0 : *first;
  Json types = Json::array();
  for (const int64_t layer_window : windows) {
    if (layer_window != 0 && layer_window != window) {
      fail(path, "all sliding windows must be equal, but there are {} and {}", window,
           layer_window);
    }
    types.push_back(layer_window > 0 ? "sliding_attention" : "full_attention");
  }
  json["sliding_window"] = window > 0 ? Json(window) : Json(nullptr);
  if (config.model_type != "mistral") {
    json["use_sliding_window"] = window > 0;
    json["max_window_layers"] = first - windows.begin();
  }
  if (config.model_type != "mistral" ||
      std::ranges::count(windows, window) != std::ssize(windows)) {
    json["layer_types"] = std::move(types);
  }
}

}  // namespace

void write_model_config(const std::string& folder, const ModelConfig& config) {
  Json json;
  json["architectures"] = {architecture_name(config.model_type)};
  json["model_type"] = config.model_type;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.num_hidden_layers;
  json["num_attention_heads"] = config.num_attention_heads;
  json["num_key_value_heads"] = config.num_key_value_heads;
  json["head_dim"] = config.head_dim;
  json["max_position_embeddings"] = config.max_position_embeddings;
  json["hidden_act"] = config.hidden_act;
  json["rms_norm_eps"] = config.rms_norm_eps;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  if (config.model_type == "llama" || config.model_type == "qwen3") {
    json["attention_bias"] = config.attention_bias;
  }
  if (config.model_type == "llama") json["mlp_bias"] = config.mlp_bias;
  json["rope_theta"] = config.rope.theta;
  json["rope_scaling"] = rope_scaling_json(config.rope);
  add_sliding_window(config, folder, json);
  json["bos_token_id"] = id_json(config.bos_token_id);
  json["eos_token_id"] = ids_json(config.eos_token_ids);
  json["pad_token_id"] = id_json(config.pad_token_id);
  json["torch_dtype"] = config.dtype;
  json["dtype"] = config.dtype;
  write_json(folder, "config.json", json);
}

void write_generation_config(const std::string& folder, const GenerationConfig& config) {
  Json json = Json::object();
  const auto add = [&](const char* key, const auto& value) {
    if (value.has_value()) json[key] = *value;
  };
  add("bos_token_id", config.bos_token_id);
  if (!config.eos_token_ids.empty()) json["eos_token_id"] = ids_json(config.eos_token_ids);
  add("pad_token_id", config.pad_token_id);
  add("do_sample", config.do_sample);
  add("temperature", config.temperature);
  add("top_k", config.top_k);
  add("top_p", config.top_p);
  add("min_p", config.min_p);
  add("repetition_penalty", config.repetition_penalty);
  write_json(folder, "generation_config.json", json);
}

}  // namespace octet::io
