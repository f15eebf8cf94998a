#include "model/decoder.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/rope_table.h"

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

Decoder::Decoder(tensor::Allocator& allocator, const Model& model, const DecoderLimits& limits)
    : model_(model),
      limits_(limits),
      activations_(allocator, model, limits.max_tokens, limits.training),
      projector_(allocator, model, limits.shadow) {
  const auto make = [&](DType dtype, const tensor::Shape& shape, std::string_view label) {
    buffers_.push_back(allocator.allocate(dtype, shape, label));
    return buffers_.back().view(dtype, shape);
  };
  rope_table_ = make(DType::kF32, {limits.max_context, model.config().head_dim}, "position table");
  ids_ = make(DType::kI32, {limits.max_tokens}, "batch layout");
  positions_ = make(DType::kI32, {limits.max_tokens}, "batch layout");
  slots_ = make(DType::kI32, {limits.max_tokens}, "batch layout");
  query_offsets_ = make(DType::kI32, {limits.max_sequences + 1}, "batch layout");
  context_lengths_ = make(DType::kI32, {limits.max_sequences}, "batch layout");
  table_width_ = KvStore::pages_for(limits.max_context);
  page_table_ = make(DType::kI32, {limits.max_sequences, table_width_}, "batch layout");
}

TensorView Decoder::forward(ops::Backend& backend, std::span<const BatchSequence> batch,
                            KvStore& pages, const ForwardMode& mode) {
  OCTET_ASSERT(!mode.save || limits_.training);
  upload_batch(backend, batch);
  saved_ = mode.save;
  const int64_t num_layers = model_.config().num_hidden_layers;
  LayerActivations a = activations_.layer(0, num_tokens_);
  backend.embedding({model_.embedding().dense, ids_.slice_rows(0, num_tokens_), a.x});
  for (int64_t index = 0; index < num_layers; ++index) {
    const bool last = index + 1 == num_layers;
    const LayerActivations next = activations_.layer(last ? index : index + 1, num_tokens_);
    forward_layer(backend, index, a,
                  last ? activations_.x_final.slice_rows(0, num_tokens_) : next.x, pages, mode);
    a = next;
  }
  const TensorView hidden = activations_.hidden.slice_rows(0, num_tokens_);
  backend.rms_norm({.x = activations_.x_final.slice_rows(0, num_tokens_),
                    .weight = model_.final_norm().dense,
                    .y = hidden,
                    .eps = static_cast<float>(model_.config().rms_norm_eps)});
  return hidden;
}

void Decoder::forward_layer(ops::Backend& backend, int64_t index, const LayerActivations& a,
                            const TensorView& next_x, KvStore& pages, const ForwardMode& mode) {
  const DecoderLayer& layer = model_.layers()[index];
  const io::ModelConfig& config = model_.config();
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const int64_t t = num_tokens_;
  const int64_t q_width = model_.attention_width();
  const int64_t k_width = config.num_key_value_heads * config.head_dim;
  const tensor::Shape q_heads{t, config.num_attention_heads, config.head_dim};
  const tensor::Shape k_heads{t, config.num_key_value_heads, config.head_dim};
  const TensorView positions = positions_.slice_rows(0, t);
  const TensorView branch = activations_.branch.slice_rows(0, t);

  backend.rms_norm({.x = a.x, .weight = layer.input_norm->dense, .y = a.normed, .eps = eps});
  projector_.forward(backend, layer.qkv, a.normed, a.qkv, std::span(&a.lora[kQ], 3), activations_,
                     mode);

  TensorView q = a.qkv.slice_columns(0, q_width).reshaped(q_heads);
  TensorView k = a.qkv.slice_columns(q_width, k_width).reshaped(k_heads);
  const TensorView v = a.qkv.slice_columns(q_width + k_width, k_width).reshaped(k_heads);
  const TensorView q_rotated = a.q_rotated.reshaped(q_heads);
  const TensorView k_rotated = activations_.k_rotated.slice_rows(0, t).reshaped(k_heads);
  if (layer.q_norm != nullptr) {
    backend.rms_norm({.x = q, .weight = layer.q_norm->dense, .y = q_rotated, .eps = eps});
    backend.rms_norm({.x = k, .weight = layer.k_norm->dense, .y = k_rotated, .eps = eps});
    q = q_rotated;
    k = k_rotated;
  }
  backend.rope({.x = q, .positions = positions, .table = rope_table_, .y = q_rotated});
  backend.rope({.x = k, .positions = positions, .table = rope_table_, .y = k_rotated});
  backend.kv_append({k_rotated, v, slots_.slice_rows(0, t), pages.layer(index)});
  backend.attention({.q = q_rotated,
                     .cache = pages.layer(index),
                     .batch = attention_batch(),
                     .out = a.attention.reshaped(q_heads),
                     .lse = a.lse,
                     .scale = attention_scale(),
                     .window = layer.window});
  projector_.forward(backend, {&layer.o, 1}, a.attention, branch, std::span(&a.lora[kO], 1),
                     activations_, mode);
  backend.add({a.x, branch, a.x_mid});

  backend.rms_norm(
      {.x = a.x_mid, .weight = layer.post_attention_norm->dense, .y = a.mlp_normed, .eps = eps});
  projector_.forward(backend, layer.gate_up, a.mlp_normed, a.gate_up, std::span(&a.lora[kGate], 2),
                     activations_, mode);
  backend.gated_activation({a.gate_up, a.activated});
  projector_.forward(backend, {&layer.down, 1}, a.activated, branch, std::span(&a.lora[kDown], 1),
                     activations_, mode);
  backend.add({a.x_mid, branch, next_x});
}

void Decoder::upload_batch(ops::Backend& backend, std::span<const BatchSequence> batch) {
  const auto num_sequences = static_cast<int64_t>(batch.size());
  OCTET_ASSERT(num_sequences > 0 && num_sequences <= limits_.max_sequences);
  if (!rope_table_ready_) {
    backend.upload(
        rope_table(model_.config().rope, model_.config().head_dim, limits_.max_context).data(),
        rope_table_);
    rope_table_ready_ = true;
  }
  std::vector<int32_t> ids, positions, slots, contexts;
  std::vector<int32_t> table(static_cast<size_t>(num_sequences * table_width_), 0);
  sequence_offsets_.assign(1, 0);
  max_query_tokens_ = max_context_ = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const BatchSequence& sequence = batch[s];
    const int64_t context = sequence.start + static_cast<int64_t>(sequence.ids.size());
    OCTET_ASSERT(!sequence.ids.empty() && context <= limits_.max_context);
    OCTET_ASSERT(KvStore::pages_for(context) <= static_cast<int64_t>(sequence.pages.size()));
    for (int64_t i = 0; i < static_cast<int64_t>(sequence.ids.size()); ++i) {
      const int32_t id = sequence.ids[i];
      if (id < 0 || id >= model_.config().vocab_size) {
        fail("token ids",
             "an id must lie in [0, {}), the model's rows, but {} stands at position {}; "
             "use the tokenizer that belongs to this model",
             model_.config().vocab_size, id, sequence.start + i);
      }
      const int64_t position = sequence.start + i;
      ids.push_back(id);
      positions.push_back(static_cast<int32_t>(position));
      slots.push_back(
          static_cast<int32_t>(sequence.pages[position / KvStore::kPageSize] * KvStore::kPageSize +
                               position % KvStore::kPageSize));
    }
    sequence_offsets_.push_back(static_cast<int32_t>(ids.size()));
    contexts.push_back(static_cast<int32_t>(context));
    max_query_tokens_ = std::max(max_query_tokens_, context - sequence.start);
    max_context_ = std::max(max_context_, context);
    for (int64_t page = 0; page < KvStore::pages_for(context); ++page) {
      table[s * table_width_ + page] = sequence.pages[page];
    }
  }
  num_tokens_ = static_cast<int64_t>(ids.size());
  OCTET_ASSERT(num_tokens_ <= limits_.max_tokens);
  backend.upload(ids.data(), ids_.slice_rows(0, num_tokens_));
  backend.upload(positions.data(), positions_.slice_rows(0, num_tokens_));
  backend.upload(slots.data(), slots_.slice_rows(0, num_tokens_));
  backend.upload(sequence_offsets_.data(), query_offsets_.slice_rows(0, num_sequences + 1));
  backend.upload(contexts.data(), context_lengths_.slice_rows(0, num_sequences));
  backend.upload(table.data(), page_table_.slice_rows(0, num_sequences));
}

ops::AttentionBatch Decoder::attention_batch() const {
  const auto num_sequences = static_cast<int64_t>(sequence_offsets_.size()) - 1;
  return {query_offsets_.slice_rows(0, num_sequences + 1),
          context_lengths_.slice_rows(0, num_sequences), page_table_.slice_rows(0, num_sequences),
          max_query_tokens_, max_context_};
}

float Decoder::attention_scale() const {
  return 1.0f / std::sqrt(static_cast<float>(model_.config().head_dim));
}

}  // namespace octet::model
