#include "model/model.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"

namespace octet::model {

Model::Model(tensor::Allocator& allocator, const io::ModelConfig& config,
             const Precision& precision, Training training,
             const std::optional<io::LoraConfig>& lora)
    : config_(config), training_(training), lora_(lora), weights_(allocator, precision) {
  const bool full = training == Training::kFull;
  if (full && precision.flow == Flow::kFp8Lora) {
    fail_usage("precision.flow", "fp8_lora keeps the weights frozen; give [lora], or use fp8_full");
  }
  const int64_t width = config.hidden_size;
  const int64_t query_width = config.num_attention_heads * config.head_dim;
  const int64_t key_width = config.num_key_value_heads * config.head_dim;
  const auto norm = [&](const std::string& name, int64_t size) {
    return &weights_.add(name, {size}, ParameterKind::kNorm, full);
  };

  embedding_ = &weights_.add("model.embed_tokens.weight", {config.vocab_size, width},
                             ParameterKind::kEmbedding, full);
  for (int64_t index = 0; index < config.num_hidden_layers; ++index) {
    const std::string prefix = fmt::format("model.layers.{}.", index);
    DecoderLayer& layer = layers_.emplace_back();
    layer.window = index < static_cast<int64_t>(config.sliding_window.size())
                       ? config.sliding_window[index]
                       : 0;
    layer.input_norm = norm(prefix + "input_layernorm.weight", width);
    const std::string attention = prefix + "self_attn.";
    WeightGroup& qkv = weights_.add_group({query_width, key_width, key_width}, width);
    const auto add_input = [&](const char* name, int64_t rows) {
      layer.qkv.push_back(add_linear(attention + name, rows, width, config.attention_bias, &qkv));
    };
    add_input("q_proj", query_width);
    add_input("k_proj", key_width);
    add_input("v_proj", key_width);
    if (config.qk_norm) {
      layer.q_norm = norm(attention + "q_norm.weight", config.head_dim);
      layer.k_norm = norm(attention + "k_norm.weight", config.head_dim);
    }
    layer.o = add_linear(attention + "o_proj", width, query_width, config.attention_output_bias);
    layer.post_attention_norm = norm(prefix + "post_attention_layernorm.weight", width);
    const std::string mlp = prefix + "mlp.";
    const int64_t inner = config.intermediate_size;
    WeightGroup& gate_up = weights_.add_group({inner, inner}, width);
    for (const char* name : {"gate_proj", "up_proj"}) {
      layer.gate_up.push_back(add_linear(mlp + name, inner, width, config.mlp_bias, &gate_up));
    }
    layer.down = add_linear(mlp + "down_proj", width, inner, config.mlp_bias);
  }
  final_norm_ = norm("model.norm.weight", width);
  head_ = config.tie_word_embeddings ? embedding_
                                     : &weights_.add("lm_head.weight", {config.vocab_size, width},
                                                     ParameterKind::kHead, full);
}

LinearLayer Model::add_linear(const std::string& module, int64_t rows, int64_t columns, bool bias,
                              WeightGroup* group) {
  const bool full = training_ == Training::kFull;
  LinearLayer layer;
  layer.module = module;
  layer.weight =
      &weights_.add(module + ".weight", {rows, columns}, ParameterKind::kLinear, full, group);
  if (bias) layer.bias = &weights_.add(module + ".bias", {rows}, ParameterKind::kBias, full);
  if (lora_ && io::lora_targets(*lora_, module)) {
    const bool trained = training_ == Training::kLora;
    const int64_t rank = io::lora_rank(*lora_, module);
    layer.lora = {
        &weights_.add(lora_key(module, false), {rank, columns}, ParameterKind::kLora, trained),
        &weights_.add(lora_key(module, true), {rows, rank}, ParameterKind::kLora, trained),
        static_cast<float>(io::lora_scale(*lora_, module))};
  }
  return layer;
}

std::vector<const LinearLayer*> Model::linear_layers() const {
  std::vector<const LinearLayer*> result;
  for (const DecoderLayer& layer : layers_) {
    for (const LinearLayer& linear : layer.qkv) result.push_back(&linear);
    result.push_back(&layer.o);
    for (const LinearLayer& linear : layer.gate_up) result.push_back(&linear);
    result.push_back(&layer.down);
  }
  return result;
}

int64_t Model::max_lora_rank() const {
  int64_t rank = 0;
  for (const LinearLayer* layer : linear_layers()) {
    if (!layer->lora.empty()) rank = std::max(rank, layer->lora.rank());
  }
  return rank;
}

int64_t Model::qkv_width() const {
  return (config_.num_attention_heads + 2 * config_.num_key_value_heads) * config_.head_dim;
}

int64_t Model::max_group_weight_elements() const {
  const int64_t attention = std::max(qkv_width(), attention_width()) * config_.hidden_size;
  return std::max(attention, 2 * config_.intermediate_size * config_.hidden_size);
}

}  // namespace octet::model
