#include "model/activations.h"

#include <algorithm>
#include <array>

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

namespace {

std::array<const LinearLayer*, kNumProjections> projections(const DecoderLayer& layer) {
  return {&layer.qkv[0],     &layer.qkv[1],     &layer.qkv[2], &layer.o,
          &layer.gate_up[0], &layer.gate_up[1], &layer.down};
}

}  // namespace

Activations::Activations(tensor::Allocator& allocator, const Model& model, int64_t max_tokens,
                         bool training)
    : allocator_(allocator), model_(model), max_tokens_(max_tokens), training_(training) {
  const io::ModelConfig& config = model.config();
  const DType dtype = model.precision().activation_dtype();
  const int64_t t = max_tokens;
  const int64_t h = config.hidden_size;
  const int64_t q = model.attention_width();
  const int64_t g = config.num_key_value_heads * config.head_dim;
  const int64_t inner = config.intermediate_size;
  const int64_t num_sets = training ? config.num_hidden_layers : 1;

  for (int64_t set = 0; set < num_sets; ++set) {
    LayerActivations a;
    a.x = make(dtype, {t, h});
    a.normed = make(dtype, {t, h});
    a.qkv = make(dtype, {t, model.qkv_width()});
    a.q_rotated = make(dtype, {t, q});
    a.attention = make(dtype, {t, q});
    a.lse = make(DType::kF32, {t, config.num_attention_heads});
    a.x_mid = make(dtype, {t, h});
    a.mlp_normed = make(dtype, {t, h});
    a.gate_up = make(dtype, {t, 2 * inner});
    a.activated = make(dtype, {t, inner});
    // A shared set serves the widest adapter of each projection.
    const auto own = static_cast<size_t>(set);
    const size_t end = training ? own + 1 : model.layers().size();
    for (size_t index = 0; index < kNumProjections; ++index) {
      int64_t rank = 0;
      for (size_t layer = own; layer < end; ++layer) {
        const LoraPair& pair = projections(model.layers()[layer])[index]->lora;
        if (!pair.empty()) rank = std::max(rank, pair.rank());
      }
      if (rank > 0) a.lora[index] = make(dtype, {t, rank});
    }
    layers_.push_back(a);
  }
  x_final = make(dtype, {t, h});
  hidden = make(dtype, {t, h});
  k_rotated = make(dtype, {t, g});
  branch = make(dtype, {t, h});
  if (model.precision().fp8()) {
    const int64_t widest = std::max({h, q, inner});
    codes = make(DType::kE4M3, {t, widest});
    scales = make(DType::kF32, {t * ((widest + tensor::kScaleBlock - 1) / tensor::kScaleBlock)});
  }
  if (!training) return;
  d_x = make(dtype, {t, h});
  d_normed = make(dtype, {t, h});
  d_activated = make(dtype, {t, inner});
  d_gate_up = make(dtype, {t, 2 * inner});
  d_attention = make(dtype, {t, q});
  d_q_rotated = make(dtype, {t, q});
  d_k_rotated = make(dtype, {t, g});
  d_qkv = make(dtype, {t, model.qkv_width()});
  if (model.lora()) d_lora = make(dtype, {t * model.max_lora_rank()});
}

TensorView Activations::make(DType dtype, tensor::Shape shape) {
  buffers_.push_back(allocator_.allocate(dtype, shape, "activations"));
  return buffers_.back().view(dtype, shape);
}

LayerActivations Activations::layer(int64_t index, int64_t num_tokens) const {
  LayerActivations a = layers_[training_ ? index : 0];
  for (TensorView* view : {&a.x, &a.normed, &a.qkv, &a.q_rotated, &a.attention, &a.lse, &a.x_mid,
                           &a.mlp_normed, &a.gate_up, &a.activated}) {
    *view = view->slice_rows(0, num_tokens);
  }
  const auto linears = projections(model_.layers()[static_cast<size_t>(index)]);
  for (size_t i = 0; i < kNumProjections; ++i) {
    const LoraPair& pair = linears[i]->lora;
    a.lora[i] = pair.empty() ? TensorView()
                             : TensorView(a.lora[i].data, a.x.dtype, {num_tokens, pair.rank()});
  }
  return a;
}

}  // namespace octet::model
