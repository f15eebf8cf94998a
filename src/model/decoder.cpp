#include "model/decoder.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "model/rope_table.h"

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

namespace {

constexpr size_t kMaxRecordings = 128;

// Parts of a batch's layout begin at multiples of 64 bytes.
int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The sizes that decode steps are filled up to: few enough to be recorded, near enough to be cheap.
int64_t rows_for(int64_t num_tokens) {
  if (num_tokens <= 8)
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(num_tokens)));
  return round_up(num_tokens, num_tokens <= 256 ? 8 : 16);
}

// Eighths of a power of two, at least 256.
int64_t context_for(int64_t context) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(context)));
  return round_up(context, std::max<int64_t>(256, power / 8));
}

}  // namespace

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
  const int64_t tokens = padded(limits.max_tokens), sequences = padded(limits.max_sequences + 1);
  layout_ = make(DType::kI32,
                 {3 * tokens + 4 * sequences +
                  padded(limits.max_sequences * KvStore::pages_for(limits.max_context)) +
                  std::max(tokens, sequences)},
                 "batch layout");
  const Precision& precision = model.precision();
  can_fill_up_ = precision.exact();
  for (const DecoderLayer& layer : model.layers()) {
    for (const std::span<const LinearLayer> group :
         {std::span<const LinearLayer>(layer.qkv), std::span(&layer.o, 1),
          std::span<const LinearLayer>(layer.gate_up), std::span(&layer.down, 1)}) {
      if (precision.fp8()) quantized_row_elements_ += group[0].weight->shape[1];
      if (group.data() != layer.qkv.data() && group[0].bias != nullptr) can_fill_up_ = false;
    }
  }
}

TensorView Decoder::forward(ops::Backend& backend, std::span<const BatchSequence> batch,
                            KvStore& pages, const ForwardMode& mode, const TensorView& sampled) {
  OCTET_ASSERT(!mode.save || limits_.training);
  saved_ = mode.save;
  measure(batch);
  const int64_t num_tokens = num_tokens_;
  Step step{num_tokens, attention_batch_.max_context, attention_batch_.max_shared_pages,
            mode.adapters, pages.layer(0).k.data};
  const bool recorded = backend.is_asynchronous() && attention_batch_.max_query_tokens == 1 &&
                        !mode.save && !mode.shadow;
  if (recorded) {
    if (can_fill_up_) {
      step.num_rows =
          std::min(rows_for(num_tokens), std::min(limits_.max_tokens, limits_.max_sequences));
    }
    step.max_context = std::min(context_for(step.max_context), limits_.max_context);
    if (step.max_shared_pages > 0) {
      step.max_shared_pages =
          static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(step.max_shared_pages)));
    }
  }
  if (!rope_table_ready_) {
    backend.upload(
        rope_table(model_.config().rope, model_.config().head_dim, limits_.max_context).data(),
        rope_table_);
    rope_table_ready_ = true;
  }
  lay_out(backend, batch, step, sampled);
  if (recorded) {
    backend.run_recorded(recording_of(step), [&] { run_layers(backend, pages, mode); });
  } else {
    run_layers(backend, pages, mode);
  }
  return activations_.hidden.slice_rows(0, num_tokens);
}

// From the ids to the final hidden states.
void Decoder::run_layers(ops::Backend& backend, KvStore& pages, const ForwardMode& mode) {
  const TensorView first = activations_.layer(0, num_tokens_).x;
  backend.embedding({model_.embedding().dense, ids_, first});
  TensorView x = first, branch;  // the stream and what is still to be added to it
  for (int64_t index = 0; index < model_.config().num_hidden_layers; ++index) {
    const LayerActivations a = activations_.layer(index, num_tokens_);
    forward_layer(backend, index, a, x, branch, pages, mode);
    x = a.x_mid;
    branch = activations_.branch.slice_rows(0, num_tokens_);
  }
  backend.rms_norm({.x = x,
                    .weight = model_.final_norm().dense,
                    .y = activations_.hidden.slice_rows(0, num_tokens_),
                    .eps = static_cast<float>(model_.config().rms_norm_eps),
                    .branch = branch,
                    .sum = activations_.x_final.slice_rows(0, num_tokens_)});
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
                            .positions = positions_,
                            .rope_table = rope_table_,
                            .slots = slots_,
                            .q_out = q_rotated,
                            .k_out = activations_.k_rotated.slice_rows(0, t).reshaped(k_heads),
                            .cache = pages.layer(index),
                            .eps = eps,
                            .keep_k = false});
  input = input_of({&layer.o, 1});
  backend.attention({.q = q_rotated,
                     .cache = pages.layer(index),
                     .batch = attention_batch_,
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

// Lengths, offsets and shared pages of a batch, on the host; refuses ids beyond the model's rows.
void Decoder::measure(std::span<const BatchSequence> batch) {
  OCTET_ASSERT(!batch.empty() && static_cast<int64_t>(batch.size()) <= limits_.max_sequences);
  sequence_offsets_.assign(1, 0);
  shared_first_.clear();
  shared_pages_.clear();
  attention_batch_ = {};
  const BatchSequence* before = nullptr;
  for (const BatchSequence& sequence : batch) {
    const auto count = static_cast<int64_t>(sequence.ids.size());
    const int64_t context = sequence.start + count;
    OCTET_ASSERT(count > 0 && context <= limits_.max_context);
    OCTET_ASSERT(KvStore::pages_for(context) <= static_cast<int64_t>(sequence.pages.size()));
    OCTET_ASSERT(sequence.sampled_row < 0 || count == 1);
    for (int64_t i = 0; i < count && sequence.sampled_row < 0; ++i) {
      const int32_t id = sequence.ids[i];
      if (id < 0 || id >= model_.config().vocab_size) {
        fail("token ids",
             "an id must lie in [0, {}), the model's rows, but {} stands at position {}; "
             "use the tokenizer that belongs to this model",
             model_.config().vocab_size, id, sequence.start + i);
      }
    }
    int32_t shared = 0;
    if (before != nullptr) {
      const int64_t full =
          std::min(context, before->start + std::ssize(before->ids)) / KvStore::kPageSize;
      while (shared < full && sequence.pages[shared] == before->pages[shared]) ++shared;
    }
    before = &sequence;
    // A run goes on as long as its sequences share a page; it shares what all of them do.
    const auto index = static_cast<int32_t>(shared_first_.size());
    const int32_t first = shared > 0 ? shared_first_.back() : index;
    if (first < index - 1) shared = std::min(shared, shared_pages_.back());
    shared_first_.push_back(first);
    shared_pages_.push_back(0);
    if (first < index) std::fill(shared_pages_.begin() + first, shared_pages_.end(), shared);
    sequence_offsets_.push_back(sequence_offsets_.back() + static_cast<int32_t>(count));
    ops::AttentionBatch& b = attention_batch_;
    b.max_query_tokens = std::max(b.max_query_tokens, count);
    b.min_query_tokens = index == 0 ? count : std::min(b.min_query_tokens, count);
    b.max_context = std::max(b.max_context, context);
  }
  attention_batch_.max_shared_pages = std::ranges::max(shared_pages_);
  num_tokens_ = sequence_offsets_.back();
  OCTET_ASSERT(num_tokens_ <= limits_.max_tokens);
}

// Writes the batch, filled up to step.num_rows, where the ops read it.
void Decoder::lay_out(ops::Backend& backend, std::span<const BatchSequence> batch, const Step& step,
                      const TensorView& sampled) {
  const auto num_sequences = static_cast<int64_t>(batch.size());
  const int64_t num_added = step.num_rows - num_tokens_;
  const int64_t all_sequences = num_sequences + num_added;
  const int64_t width = KvStore::pages_for(step.max_context);
  num_tokens_ = step.num_rows;
  int64_t used = 0;
  const auto section = [&](const tensor::Shape& shape) {
    const TensorView view(layout_.as<int32_t>() + used, DType::kI32, shape);
    used += padded(shape.num_elements());
    return view;
  };
  ids_ = section({num_tokens_});
  positions_ = section({num_tokens_});
  slots_ = section({num_tokens_});
  ops::AttentionBatch& b = attention_batch_;
  b.query_offsets = section({all_sequences + 1});
  b.context_lengths = section({all_sequences});
  const TensorView shared_first = section({all_sequences});
  const TensorView shared_pages = section({all_sequences});
  if (step.max_shared_pages > 0) {
    b.shared_first = shared_first;
    b.shared_pages = shared_pages;
  }
  b.page_table = section({all_sequences, width});
  b.max_context = step.max_context;
  b.max_shared_pages = step.max_shared_pages;
  const TensorView targets = section({sampled.empty() ? 0 : sampled.shape[0]});
  OCTET_ASSERT(used <= layout_.shape[0]);

  host_layout_.assign(static_cast<size_t>(used), 0);
  const auto host = [&](const TensorView& view) {
    return host_layout_.data() + (view.as<int32_t>() - layout_.as<int32_t>());
  };
  int32_t* ids = host(ids_);
  int32_t* positions = host(positions_);
  int32_t* slots = host(slots_);
  int32_t* table = host(b.page_table);
  std::fill_n(host(targets), targets.num_elements(), -1);
  std::ranges::copy(sequence_offsets_, host(b.query_offsets));
  std::ranges::copy(shared_first_, host(shared_first));
  std::ranges::copy(shared_pages_, host(shared_pages));
  bool any_sampled = false;
  int64_t t = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const BatchSequence& sequence = batch[s];
    const int64_t context = sequence.start + std::ssize(sequence.ids);
    if (sequence.sampled_row >= 0) {
      host(targets)[sequence.sampled_row] = static_cast<int32_t>(t);
      any_sampled = true;
    }
    for (int64_t position = sequence.start; position < context; ++position, ++t) {
      ids[t] = sequence.ids[position - sequence.start];
      positions[t] = static_cast<int32_t>(position);
      slots[t] =
          static_cast<int32_t>(sequence.pages[position / KvStore::kPageSize] * KvStore::kPageSize +
                               position % KvStore::kPageSize);
    }
    host(b.context_lengths)[s] = static_cast<int32_t>(context);
    std::copy_n(sequence.pages.begin(), KvStore::pages_for(context), table + s * width);
  }
  for (; t < num_tokens_; ++t) {  // only where every sequence has one token
    ids[t] = slots[t] = -1;
    host(b.query_offsets)[t + 1] = static_cast<int32_t>(t + 1);
    host(shared_first)[t] = static_cast<int32_t>(t);
  }
  backend.upload(host_layout_.data(), layout_.slice_rows(0, used));
  if (any_sampled) backend.scatter_rows({sampled, targets, ids_});
  if (num_added > 0) backend.discount_zeros(num_added * quantized_row_elements_);
}

std::unique_ptr<ops::Recording>& Decoder::recording_of(const Step& step) {
  RecordedStep* oldest = nullptr;
  ++num_recorded_;
  for (RecordedStep& recorded : recordings_) {
    if (recorded.step == step) {
      recorded.last_use = num_recorded_;
      return recorded.recording;
    }
    if (oldest == nullptr || recorded.last_use < oldest->last_use) oldest = &recorded;
  }
  if (recordings_.size() < kMaxRecordings) oldest = &recordings_.emplace_back();
  *oldest = {step, nullptr, num_recorded_};
  return oldest->recording;
}

float Decoder::attention_scale() const {
  return 1.0f / std::sqrt(static_cast<float>(model_.config().head_dim));
}

}  // namespace octet::model
