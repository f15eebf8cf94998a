#include "io/peft.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "base/strings.h"
#include "io/json_keys.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::TensorView;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kSuffixA = ".lora_A.weight";
constexpr std::string_view kSuffixB = ".lora_B.weight";

std::string join_path(const std::string& folder, const char* name) {
  return (std::filesystem::path(folder) / name).string();
}

// Whether a pattern matches a whole path. The matcher gives up on one that takes too many steps.
bool matches(const std::string& pattern, const std::string& path) {
  const std::string whole = fmt::format("^(?:{})$", pattern);
  const auto bytes = [](const std::string& text) {
    return reinterpret_cast<PCRE2_SPTR>(text.data());
  };
  int status = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(bytes(whole), whole.size(), PCRE2_UTF, &status, &offset, nullptr);
  if (code != nullptr) {
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code, nullptr);
    status = pcre2_match(code, bytes(path), path.size(), 0, 0, match, nullptr);
    pcre2_match_data_free(match);
    pcre2_code_free(code);
  }
  if (code == nullptr || (status < 0 && status != PCRE2_ERROR_NOMATCH)) {
    char reason[256] = "";
    pcre2_get_error_message(status, reinterpret_cast<PCRE2_UCHAR*>(reason), sizeof(reason));
    fail(kConfigFile, "\"{}\" must be a regular expression for module paths, but: {}", pattern,
         reason);
  }
  return status >= 0;
}

// PEFT matches these patterns against the end of a path, from the start of one of its parts.
template <class T>
T by_pattern(const std::map<std::string, T>& patterns, std::string_view path, T otherwise) {
  for (const auto& [pattern, value] : patterns) {
    if (matches(fmt::format("(?:.*\\.)?(?:{})", pattern), std::string(path))) return value;
  }
  return otherwise;
}

template <class T>
std::map<std::string, T> read_patterns(const JsonKeys& keys, const char* key) {
  std::map<std::string, T> patterns;
  const std::optional<JsonKeys> fields = keys.find_object(key);
  if (!fields.has_value()) return patterns;
  for (const auto& [pattern, value] : keys.find(key)->items()) {
    patterns[pattern] = static_cast<T>(fields->get_positive(pattern));
  }
  return patterns;
}

// Whether a key is set to something: neither null, false, 0 nor empty.
bool is_set(const Json* value) {
  if (value == nullptr) return false;
  if (value->is_boolean()) return value->get<bool>();
  if (value->is_number()) return value->get<double>() != 0;
  return !value->empty() && *value != "";
}

void refuse_unsupported(const JsonKeys& keys) {
  if (keys.get_string("peft_type") != "LORA") keys.wrong("peft_type", "\"LORA\"");
  if (keys.find_string("bias").value_or("none") != "none") {
    keys.wrong("bias", "\"none\" (trained biases are not supported)");
  }
  for (const char* key :
       {"use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out", "use_qalora", "use_bdlora",
        "layer_replication", "target_parameters", "trainable_token_indices",
        "alora_invocation_tokens", "arrow_config", "kasa_config"}) {
    if (is_set(keys.find(key))) keys.wrong(key, "unset (it is not supported)");
  }
  // The others replace the base weights too, so the adapter alone does not say what was trained.
  const Json* init = keys.find("init_lora_weights");
  if (init != nullptr && !init->is_boolean() && *init != "gaussian" && *init != "orthogonal" &&
      *init != "eva") {
    keys.wrong("init_lora_weights", "true, false, \"gaussian\", \"orthogonal\" or \"eva\"");
  }
}

LoraConfig read_config(const std::string& path) {
  const Json json = read_json_file(path);
  const JsonKeys keys(json, path);
  refuse_unsupported(keys);
  LoraConfig config;
  config.r = keys.size_or("r", config.r);
  config.lora_alpha = keys.positive_or("lora_alpha", 8.0);  // PEFT's default
  config.use_rslora = keys.find_bool("use_rslora").value_or(false);
  config.lora_dropout = keys.find_double("lora_dropout").value_or(0.0);
  config.base_model_name_or_path = keys.find_string("base_model_name_or_path").value_or("");
  const Json* targets = keys.find("target_modules");
  if (targets != nullptr && targets->is_string()) {
    config.target_pattern = targets->get<std::string>();
  } else {
    config.target_modules = keys.find_strings("target_modules");
    std::ranges::sort(config.target_modules);
  }
  config.rank_pattern = read_patterns<int64_t>(keys, "rank_pattern");
  config.alpha_pattern = read_patterns<double>(keys, "alpha_pattern");
  return config;
}

// Rank and shapes of a module; `where` names the file in errors.
void check_module(const std::string& where, const LoraConfig& config, const LoraModule& module) {
  const auto is_matrix = [](const TensorView& view) {
    return view.shape.rank() == 2 && view.num_elements() > 0 &&
           (view.dtype == DType::kF32 || view.dtype == DType::kBF16 || view.dtype == DType::kF16);
  };
  const int64_t rank = lora_rank(config, module.path);
  if (!is_matrix(module.a) || !is_matrix(module.b) || module.a.shape[0] != rank ||
      module.b.shape[1] != rank) {
    fail(where,
         "module \"{}\": lora_A must be [{}, in] and lora_B [out, {}] in F32, BF16 or F16, "
         "but they are {} {} and {} {}",
         module.path, rank, rank, tensor::dtype_name(module.a.dtype), module.a.shape.to_string(),
         tensor::dtype_name(module.b.dtype), module.b.shape.to_string());
  }
}

}  // namespace

bool lora_targets(const LoraConfig& config, std::string_view module_path) {
  if (!config.target_pattern.empty()) {
    return config.target_pattern == "all-linear" ||
           matches(config.target_pattern, std::string(module_path));
  }
  return config.target_modules.empty() ||
         std::ranges::any_of(config.target_modules, [&](const std::string& name) {
           return module_path == name || module_path.ends_with("." + name);
         });
}

int64_t lora_rank(const LoraConfig& config, std::string_view module_path) {
  return by_pattern(config.rank_pattern, module_path, config.r);
}

double lora_scale(const LoraConfig& config, std::string_view module_path) {
  const auto rank = static_cast<double>(lora_rank(config, module_path));
  const double alpha = by_pattern(config.alpha_pattern, module_path, config.lora_alpha);
  return alpha / (config.use_rslora ? std::sqrt(rank) : rank);
}

PeftAdapter read_peft_adapter(const std::string& folder) {
  PeftAdapter adapter;
  adapter.config = read_config(join_path(folder, kConfigFile));
  const std::string path = join_path(folder, kWeightsFile);
  adapter.file = std::make_shared<SafetensorsFile>(path);
  std::map<std::string, LoraModule> modules;
  for (const std::string& name : adapter.file->names()) {
    const bool is_a = name.ends_with(kSuffixA);
    if (!name.starts_with(kPrefix) || (!is_a && !name.ends_with(kSuffixB)) ||
        name.size() <= kPrefix.size() + kSuffixA.size()) {
      fail(path,
           "tensor \"{}\" must be \"{}<module>{}\" or the same with lora_B; others "
           "(embeddings, DoRA, saved modules) are not supported",
           name, kPrefix, kSuffixA);
    }
    const std::string module =
        name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffixA.size());
    (is_a ? modules[module].a : modules[module].b) = adapter.file->view(name);
  }
  if (modules.empty()) fail(path, "at least one adapted module is required, but there is none");
  for (auto& [name, module] : modules) {
    module.path = name;
    if (module.a.empty() || module.b.empty()) {
      fail(path, "module \"{}\" needs both lora_A and lora_B, but has only one", name);
    }
    check_module(path, adapter.config, module);
    module.scale = lora_scale(adapter.config, name);
    adapter.modules.push_back(module);
  }
  return adapter;
}

void write_peft_adapter(const std::string& folder, const LoraConfig& config,
                        const std::vector<LoraModule>& modules) {
  const std::string path = join_path(folder, kWeightsFile);
  std::vector<NamedTensor> tensors;
  std::set<std::string> target_modules;
  for (const LoraModule& module : modules) {
    check_module(path, config, module);
    OCTET_ASSERT(std::abs(module.scale - lora_scale(config, module.path)) <= 1e-6 * module.scale);
    tensors.push_back({fmt::format("{}{}{}", kPrefix, module.path, kSuffixA), module.a});
    tensors.push_back({fmt::format("{}{}{}", kPrefix, module.path, kSuffixB), module.b});
    target_modules.insert(module.path.substr(module.path.rfind('.') + 1));
  }
  Json targets = config.target_modules.empty() ? Json(target_modules) : Json(config.target_modules);
  if (!config.target_pattern.empty()) targets = config.target_pattern;
  const auto number = [](double value) {
    return value == std::floor(value) && std::abs(value) < 1e15 ? Json(static_cast<int64_t>(value))
                                                                : Json(value);
  };
  Json alpha_pattern = Json::object();
  for (const auto& [pattern, alpha] : config.alpha_pattern) alpha_pattern[pattern] = number(alpha);
  Json json;
  json["peft_type"] = "LORA";
  json["task_type"] = "CAUSAL_LM";
  json["base_model_name_or_path"] = config.base_model_name_or_path;
  json["revision"] = nullptr;
  json["inference_mode"] = true;
  json["r"] = config.r;
  json["lora_alpha"] = number(config.lora_alpha);
  json["lora_dropout"] = config.lora_dropout;
  json["target_modules"] = std::move(targets);
  json["bias"] = "none";
  json["fan_in_fan_out"] = false;
  json["use_rslora"] = config.use_rslora;
  json["use_dora"] = false;
  json["modules_to_save"] = nullptr;
  json["init_lora_weights"] = true;
  json["rank_pattern"] = config.rank_pattern.empty() ? Json::object() : Json(config.rank_pattern);
  json["alpha_pattern"] = std::move(alpha_pattern);
  json["layers_to_transform"] = nullptr;
  json["layers_pattern"] = nullptr;
  json["auto_mapping"] = nullptr;

  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder, "the folder cannot be made: {}", error.message());
  write_safetensors(path, tensors);
  write_file_atomically(join_path(folder, kConfigFile), json.dump(2) + "\n");
}

}  // namespace octet::io
