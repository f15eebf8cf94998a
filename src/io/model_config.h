// The shape of a model, as config.json of a Hugging Face folder gives it (transformers v4 and v5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet::io {

enum class RopeType { kDefault, kLinear, kLlama3 };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;
};

struct ModelConfig {
  std::string model_type;  // "llama", "qwen3", …
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
  bool attention_bias = false;  // on q, k, v
  bool qk_norm = false;         // per head, before RoPE (Qwen3)
  RopeConfig rope;
  std::vector<int64_t> sliding_window;  // per layer, 0: full attention
  std::string hidden_act = "silu";
  std::vector<int32_t> eos_token_ids;
  int32_t bos_token_id = -1;
  int32_t pad_token_id = -1;
};

}  // namespace octet::io
