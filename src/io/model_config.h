// The shape of a model, as config.json of a Hugging Face folder gives it (transformers v4 and v5),
// and generation_config.json.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace octet::io {

inline constexpr std::array<std::string_view, 4> kModelTypes = {"llama", "mistral", "qwen2",
                                                                "qwen3"};

enum class RopeType { kDefault, kLinear, kLlama3 };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;
};

// How the linear weights of an FP8 checkpoint are scaled, as quantization_config says.
struct QuantizationConfig {
  std::string method;                                              // "compressed-tensors" or "fp8"
  tensor::Granularity weights = tensor::Granularity::kTensor;      // kTensor, kRow or kBlock
  tensor::Granularity activations = tensor::Granularity::kTensor;  // kTensor, kRow or kRowBlock
  bool static_activations = false;                                 // X.input_scale is stored
  std::vector<std::string> ignore;  // module names, class names or "re:…"
};

struct ModelConfig {
  std::string model_type;  // one of kModelTypes
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  bool attention_bias = false;         // on q, k, v
  bool attention_output_bias = false;  // on o (Llama and Qwen3 with attention_bias)
  bool mlp_bias = false;               // on gate, up, down
  bool qk_norm = false;                // per head, before RoPE (Qwen3)
  RopeConfig rope;
  std::vector<int64_t> sliding_window;  // per layer, 0: full attention
  std::string hidden_act = "silu";
  std::vector<int32_t> eos_token_ids;
  int32_t bos_token_id = -1;
  int32_t pad_token_id = -1;
  std::string dtype = "bfloat16";  // of the stored weights: "float32", "bfloat16" or "float16"
  std::optional<QuantizationConfig> quantization;
};

// What the model's makers recommend for sampling. An absent value is nullopt or empty.
struct GenerationConfig {
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  std::optional<int32_t> pad_token_id;
  std::optional<bool> do_sample;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int64_t> top_k;
};

// Reads config.json. Errors name the file, the key, what is supported and what was given.
// `rope_parameters` wins over `rope_theta` and `rope_scaling`; `dtype` over `torch_dtype`; an
// explicit `head_dim` over hidden_size / num_attention_heads.
ModelConfig read_model_config(const std::string& folder);

// Reads generation_config.json; without the file everything is absent.
GenerationConfig read_generation_config(const std::string& folder);

// The end tokens of both files, each once, those of generation_config.json first.
std::vector<int32_t> stop_token_ids(const ModelConfig& model, const GenerationConfig& generation);

// Writes config.json with the keys of both transformers eras; quantization_config is left out.
void write_model_config(const std::string& folder, const ModelConfig& config);
void write_generation_config(const std::string& folder, const GenerationConfig& config);

}  // namespace octet::io
