// The one forward: prefill, decode, scoring and training are the same ops over paged keys and
// values. Training's forward is a prefill that remembers.
#pragma once

#include <span>
#include <vector>

#include "model/activations.h"
#include "model/kv_store.h"
#include "model/projection.h"

namespace octet::model {

// New tokens of one sequence, at positions start, start + 1, …; `pages` holds positions 0 … start +
// ids.size() − 1, the earlier ones already written under the same weights.
struct BatchSequence {
  std::span<const int32_t> ids;
  int64_t start = 0;
  std::span<const int32_t> pages;
};

struct DecoderLimits {
  int64_t max_tokens = 0;     // new tokens of one call
  int64_t max_sequences = 0;  // sequences of one call
  int64_t max_context = 0;    // positions of one sequence
  bool training = false;      // backward may be called
  bool shadow = false;        // ForwardMode::shadow may be asked for
};

class Decoder {
 public:
  // Allocates everything it will need; the model must outlive it.
  Decoder(tensor::Allocator& allocator, const Model& model, const DecoderLimits& limits);

  const Model& model() const { return model_; }
  const DecoderLimits& limits() const { return limits_; }

  // Writes the sequences' keys and values into their pages and returns the final hidden states
  // [T, H], T the sum of new tokens in order; valid until the next call. The limits are the
  // caller's to keep. An id beyond the model's rows is an Error naming it.
  tensor::TensorView forward(ops::Backend& backend, std::span<const BatchSequence> batch,
                             KvStore& pages, const ForwardMode& mode = {});

  // Where the gradient of the last forward's hidden states may be written, [T, H].
  tensor::TensorView d_hidden() const;

  // Adds the gradients of all trained parameters for d_hidden [T, H] (activation dtype) of the last
  // forward, which had `save` and whole sequences (start 0). The pages must still be held. d_hidden
  // may be overwritten.
  void backward(ops::Backend& backend, const tensor::TensorView& d_hidden, KvStore& pages);

 private:
  void upload_batch(ops::Backend& backend, std::span<const BatchSequence> batch);
  void forward_layer(ops::Backend& backend, int64_t index, const LayerActivations& a,
                     const tensor::TensorView& x, const tensor::TensorView& x_branch,
                     KvStore& pages, const ForwardMode& mode);
  void backward_layer(ops::Backend& backend, int64_t index, const tensor::TensorView& d_x,
                      KvStore& pages);
  ops::AttentionBatch attention_batch() const;
  float attention_scale() const;

  const Model& model_;
  DecoderLimits limits_;
  Activations activations_;
  Projector projector_;
  std::vector<tensor::Buffer> buffers_;
  tensor::TensorView rope_table_;  // [max_context, D] F32
  bool rope_table_ready_ = false;
  tensor::TensorView ids_, positions_, slots_;  // [max_tokens] I32
  tensor::TensorView query_offsets_, context_lengths_, page_table_;
  std::vector<int32_t> sequence_offsets_;  // of the last batch, on the host
  int64_t num_tokens_ = 0;
  int64_t max_query_tokens_ = 0, max_context_ = 0;  // of the last batch
  int64_t table_width_ = 0;
  bool saved_ = false;
};

}  // namespace octet::model
