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
  const auto eps = static_cast<float>(model_.config().rms_norm_eps);
  const TensorView first = activations_.layer(0, num_tokens_).x;
  backend.embedding({model_.embedding().dense, ids_.slice_rows(0, num_tokens_), first});
  TensorView x = first, branch;  // the stream and what is still to be added to it
  for (int64_t index = 0; index < model_.config().num_hidden_layers; ++index) {
    const LayerActivations a = activations_.layer(index, num_tokens_);
    forward_layer(backend, index, a, x, branch, pages, mode);
    x = a.x_mid;
    branch = activations_.branch.slice_rows(0, num_tokens_);
  }
  const TensorView hidden = activations_.hidden.slice_rows(0, num_tokens_);
  backend.rms_norm({.x = x,
                    .weight = model_.final_norm().dense,
                    .y = hidden,
                    .eps = eps,
                    .branch = branch,
                    .sum = activations_.x_final.slice_rows(0, num_tokens_)});
  return hidden;
}

// Leaves a.x_mid and the branch of the MLP, not yet added.
void Decoder::forward_layer(ops::Backend& backend, int64_t index, const LayerActivations& a,
                            const TensorView& x, const TensorView& x_branch, KvStore& pages,
                            const ForwardMode& mode) {
  const DecoderLayer& layer = model_.layers()[index];
  const io::ModelConfig& config = model_.config();
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const int64_t t = num_tokens_;
  const tensor::Shape q_heads{t, config.num_attention_heads, config.head_dim};
  const tensor::Shape k_heads{t, config.num_key_value_heads, config.head_dim};
  const TensorView branch = activations_.branch.slice_rows(0, t);
  const TensorView q_rotated = a.q_rotated.reshaped(q_heads);
  const auto input_of = [&](std::span<const LinearLayer> group) {
    return projector_.input_of(group, t, activations_, mode);
  };

  ops::QuantizedOutput input = input_of(layer.qkv);
  backend.rms_norm({.x = x,
                    .weight = layer.input_norm->dense,
                    .y = a.normed,
                    .eps = eps,
                    .branch = x_branch,
                    .sum = x_branch.empty() ? TensorView() : a.x,
                    .quantized = input});
  projector_.forward(backend, layer.qkv, a.normed, input, a.qkv, std::span(&a.lora[kQ], 3), mode);
  const bool norms = layer.q_norm != nullptr;
  backend.attention_inputs({.qkv = a.qkv,
                            .q_norm = norms ? layer.q_norm->dense : TensorView(),
                            .k_norm = norms ? layer.k_norm->dense : TensorView(),
                            .positions = positions_.slice_rows(0, t),
                            .rope_table = rope_table_,
                            .slots = slots_.slice_rows(0, t),
                            .q_out = q_rotated,
                            .k_out = activations_.k_rotated.slice_rows(0, t).reshaped(k_heads),
                            .cache = pages.layer(index),
                            .eps = eps,
                            .keep_k = false});
  input = input_of({&layer.o, 1});
  backend.attention({.q = q_rotated,
                     .cache = pages.layer(index),
                     .batch = attention_batch(),
                     .out = a.attention.reshaped(q_heads),
                     .lse = mode.save ? a.lse : TensorView(),
                     .scale = attention_scale(),
                     .window = layer.window,
                     .quantized = input});
  projector_.forward(backend, {&layer.o, 1}, a.attention, input, branch, std::span(&a.lora[kO], 1),
                     mode);

  input = input_of(layer.gate_up);
  backend.rms_norm({.x = a.x,
                    .weight = layer.post_attention_norm->dense,
                    .y = a.mlp_normed,
                    .eps = eps,
                    .branch = branch,
                    .sum = a.x_mid,
                    .quantized = input});
  projector_.forward(backend, layer.gate_up, a.mlp_normed, input, a.gate_up,
                     std::span(&a.lora[kGate], 2), mode);
  input = input_of({&layer.down, 1});
  backend.gated_activation({.gate_up = a.gate_up, .out = a.activated, .quantized = input});
  projector_.forward(backend, {&layer.down, 1}, a.activated, input, branch,
                     std::span(&a.lora[kDown], 1), mode);
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
