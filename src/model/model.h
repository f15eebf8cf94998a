// A policy: the shape of a decoder, its precision, its parameters, and where each layer finds them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/model_config.h"
#include "model/lora.h"
#include "model/weight_store.h"

namespace octet::model {

// A linear layer: its weight, its bias or null, its adapter or an empty one.
struct LinearLayer {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  Parameter* weight = nullptr;
  Parameter* bias = nullptr;
  LoraPair lora;
};

struct DecoderLayer {
  Parameter* input_norm = nullptr;
  std::vector<LinearLayer> qkv;  // q, k, v
  Parameter* q_norm = nullptr;   // or null
  Parameter* k_norm = nullptr;
  LinearLayer o;
  Parameter* post_attention_norm = nullptr;
  std::vector<LinearLayer> gate_up;  // gate, up
  LinearLayer down;
  int64_t window = 0;  // 0: full attention
};

// What is trained: nothing, every weight, or the adapters alone.
enum class Training { kNone, kFull, kLora };

class Model {
 public:
  // Allocates; nothing is loaded yet. `lora` adds adapters (trained with Training::kLora).
  Model(tensor::Allocator& allocator, const io::ModelConfig& config, const Precision& precision,
        Training training, const std::optional<io::LoraConfig>& lora);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const io::ModelConfig& config() const { return config_; }
  const Precision& precision() const { return weights_.precision(); }
  Training training() const { return training_; }
  const std::optional<io::LoraConfig>& lora() const { return lora_; }
  WeightStore& weights() { return weights_; }
  const WeightStore& weights() const { return weights_; }

  const std::vector<DecoderLayer>& layers() const { return layers_; }
  Parameter& embedding() const { return *embedding_; }
  Parameter& final_norm() const { return *final_norm_; }
  Parameter& head() const { return *head_; }  // the embedding itself where they are tied

  // The linear layers of all layers, in order.
  std::vector<const LinearLayer*> linear_layers() const;

  // Largest widths, for scratch: of a group's outputs, of a linear's input.
  int64_t qkv_width() const;
  int64_t attention_width() const { return config_.num_attention_heads * config_.head_dim; }
  int64_t max_group_weight_elements() const;
  int64_t max_lora_rank() const;

 private:
  LinearLayer add_linear(const std::string& module, int64_t rows, int64_t columns, bool bias,
                         WeightGroup* group = nullptr);

  io::ModelConfig config_;
  Training training_;
  std::optional<io::LoraConfig> lora_;
  WeightStore weights_;
  Parameter* embedding_ = nullptr;
  Parameter* final_norm_ = nullptr;
  Parameter* head_ = nullptr;
  std::vector<DecoderLayer> layers_;
};

}  // namespace octet::model
