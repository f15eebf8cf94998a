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

// Projections that read one input: their intermediate results stand side by side.
constexpr std::pair<ProjectionIndex, ProjectionIndex> kGroups[] = {
    {kQ, kO}, {kO, kGate}, {kGate, kDown}, {kDown, kNumProjections}};  // from, before

int64_t rank_of(const DecoderLayer& layer, size_t index) {
  const LoraPair& pair = projections(layer)[index]->lora;
  return pair.empty() ? 0 : pair.rank();
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
    // A shared set serves the widest adapters of each group.
    const auto own = static_cast<size_t>(set);
    const size_t end = training ? own + 1 : model.layers().size();
    for (const auto& [first, last] : kGroups) {
      int64_t widest = 0;
      for (size_t layer = own; layer < end; ++layer) {
        int64_t width = 0;
        for (size_t i = first; i < last; ++i) width += rank_of(model.layers()[layer], i);
        widest = std::max(widest, width);
      }
      if (widest > 0) a.lora[first] = make(dtype, {t, widest});
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
  const DecoderLayer& layer = model_.layers()[static_cast<size_t>(index)];
  for (const auto& [first, last] : kGroups) {
    int64_t width = 0;
    for (size_t i = first; i < last; ++i) width += rank_of(layer, i);
    const TensorView all(a.lora[first].data, a.x.dtype, {num_tokens, width});
    int64_t column = 0;
    for (size_t i = first; i < last; ++i) {
      const int64_t rank = rank_of(layer, i);
      a.lora[i] = rank > 0 ? all.slice_columns(column, rank) : TensorView();
      column += rank;
    }
  }
  return a;
}

}  // namespace octet::model
