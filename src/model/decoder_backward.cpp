#include "base/error.h"
#include "model/decoder.h"

namespace octet::model {

using tensor::TensorView;

TensorView Decoder::d_hidden() const { return activations_.d_normed.slice_rows(0, num_tokens_); }

void Decoder::backward(ops::Backend& backend, const TensorView& d_hidden, KvStore& pages) {
  OCTET_ASSERT(saved_ && d_hidden.shape[0] == num_tokens_);
  const TensorView d_x = activations_.d_x.slice_rows(0, num_tokens_);
  backend.rms_norm_backward({.dy = d_hidden,
                             .x = activations_.x_final.slice_rows(0, num_tokens_),
                             .weight = model_.final_norm().dense,
                             .dx = d_x,
                             .dweight = model_.final_norm().gradient,
                             .eps = static_cast<float>(model_.config().rms_norm_eps)});
  for (int64_t index = model_.config().num_hidden_layers - 1; index >= 0; --index) {
    backward_layer(backend, index, d_x, pages);
  }
  if (model_.embedding().trained) {
    backend.embedding_backward({d_x, ids_, model_.embedding().gradient});
  }
}

// d_x holds the gradient of the layer's output on entry and of its input on return.
void Decoder::backward_layer(ops::Backend& backend, int64_t index, const TensorView& d_x,
                             KvStore& pages) {
  const DecoderLayer& layer = model_.layers()[index];
  const io::ModelConfig& config = model_.config();
  const LayerActivations a = activations_.layer(index, num_tokens_);
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const int64_t t = num_tokens_;
  const int64_t q_width = model_.attention_width();
  const int64_t k_width = config.num_key_value_heads * config.head_dim;
  const tensor::Shape q_heads{t, config.num_attention_heads, config.head_dim};
  const tensor::Shape k_heads{t, config.num_key_value_heads, config.head_dim};
  const TensorView d_normed = activations_.d_normed.slice_rows(0, t);

  // MLP.
  const TensorView d_activated = activations_.d_activated.slice_rows(0, t);
  const TensorView d_gate_up = activations_.d_gate_up.slice_rows(0, t);
  projector_.backward(backend, {&layer.down, 1}, d_x, a.activated, std::span(&a.lora[kDown], 1),
                      d_activated, sequence_offsets_, activations_);
  backend.gated_activation_backward({d_activated, a.gate_up, d_gate_up});
  projector_.backward(backend, layer.gate_up, d_gate_up, a.mlp_normed, std::span(&a.lora[kGate], 2),
                      d_normed, sequence_offsets_, activations_);
  backend.rms_norm_backward({.dy = d_normed,
                             .x = a.x_mid,
                             .weight = layer.post_attention_norm->dense,
                             .dx = d_x,
                             .dweight = layer.post_attention_norm->gradient,
                             .eps = eps,
                             .accumulate = true});

  // Attention.
  const TensorView d_attention = activations_.d_attention.slice_rows(0, t);
  projector_.backward(backend, {&layer.o, 1}, d_x, a.attention, std::span(&a.lora[kO], 1),
                      d_attention, sequence_offsets_, activations_);
  const TensorView d_qkv = activations_.d_qkv.slice_rows(0, t);
  const TensorView d_q = d_qkv.slice_columns(0, q_width).reshaped(q_heads);
  const TensorView d_k = d_qkv.slice_columns(q_width, k_width).reshaped(k_heads);
  const TensorView d_v = d_qkv.slice_columns(q_width + k_width, k_width).reshaped(k_heads);
  const TensorView d_q_rotated = activations_.d_q_rotated.slice_rows(0, t).reshaped(q_heads);
  const TensorView d_k_rotated = activations_.d_k_rotated.slice_rows(0, t).reshaped(k_heads);
  backend.attention_backward({.q = a.q_rotated.reshaped(q_heads),
                              .cache = pages.layer(index),
                              .batch = attention_batch_,
                              .out = a.attention.reshaped(q_heads),
                              .lse = a.lse,
                              .dout = d_attention.reshaped(q_heads),
                              .dq = d_q_rotated,
                              .dk = d_k_rotated,
                              .dv = d_v,
                              .scale = attention_scale(),
                              .window = layer.window});
  const bool norms = layer.q_norm != nullptr;
  backend.rope({d_q_rotated, positions_, rope_table_, norms ? d_q_rotated : d_q, true});
  backend.rope({d_k_rotated, positions_, rope_table_, norms ? d_k_rotated : d_k, true});
  if (norms) {
    backend.rms_norm_backward({.dy = d_q_rotated,
                               .x = a.qkv.slice_columns(0, q_width).reshaped(q_heads),
                               .weight = layer.q_norm->dense,
                               .dx = d_q,
                               .dweight = layer.q_norm->gradient,
                               .eps = eps});
    backend.rms_norm_backward({.dy = d_k_rotated,
                               .x = a.qkv.slice_columns(q_width, k_width).reshaped(k_heads),
                               .weight = layer.k_norm->dense,
                               .dx = d_k,
                               .dweight = layer.k_norm->gradient,
                               .eps = eps});
  }
  projector_.backward(backend, layer.qkv, d_qkv, a.normed, std::span(&a.lora[kQ], 3), d_normed,
                      sequence_offsets_, activations_);
  backend.rms_norm_backward({.dy = d_normed,
                             .x = a.x,
                             .weight = layer.input_norm->dense,
                             .dx = d_x,
                             .dweight = layer.input_norm->gradient,
                             .eps = eps,
                             .accumulate = true});
}

}  // namespace octet::model
