// LoRA adapters as the PEFT library stores them: adapter_config.json and
// adapter_model.safetensors. Effective weight: W + scale · B · A.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "tensor/tensor.h"

namespace octet::io {

struct LoraConfig {
  int64_t r = 8;
  double lora_alpha = 16.0;
  bool use_rslora = false;                  // scale α/√r instead of α/r
  std::vector<std::string> target_modules;  // ends of module paths, or whole paths
  std::string target_pattern;               // or one regular expression for whole paths
  double lora_dropout = 0.0;
  std::string base_model_name_or_path;
  // Per module, keyed by a regular expression for the end of its path; they override r and α.
  std::map<std::string, int64_t> rank_pattern;
  std::map<std::string, double> alpha_pattern;
};

// Whether a linear layer takes an adapter, as PEFT decides it: its path, or the end of it from one
// of its parts on, is listed; or the pattern matches its whole path ("all-linear" matches all).
// Without either every one does.
bool lora_targets(const LoraConfig& config, std::string_view module_path);

// The rank and the scale of one module under the patterns.
int64_t lora_rank(const LoraConfig& config, std::string_view module_path);
double lora_scale(const LoraConfig& config, std::string_view module_path);

struct LoraModule {
  std::string path;      // "model.layers.0.self_attn.q_proj"
  tensor::TensorView a;  // [r, in], as stored (F32, BF16 or F16)
  tensor::TensorView b;  // [out, r]
  double scale = 1.0;
};

struct PeftAdapter {
  LoraConfig config;
  std::vector<LoraModule> modules;        // sorted by path
  std::shared_ptr<SafetensorsFile> file;  // what the views look into
};

// Unknown keys of adapter_config.json are ignored; what changes the arithmetic and is not
// supported (DoRA, biases, modules_to_save, embeddings …) is an Error naming the key. Every tensor
// is used or named in an Error.
PeftAdapter read_peft_adapter(const std::string& folder);

// Creates the folder where needed and writes both files so that PEFT loads them. `scale` of the
// modules is not stored: it follows from the config and must agree with it.
void write_peft_adapter(const std::string& folder, const LoraConfig& config,
                        const std::vector<LoraModule>& modules);

}  // namespace octet::io
