// The one forward: prefill, decode, scoring and training are the same ops over paged keys and
// values. Training's forward is a prefill that remembers.
#pragma once

#include <memory>
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
  int32_t sampled_row = -1;  // ≥ 0: ids has one entry, not known yet: that row of `sampled`
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
  // caller's to keep. An id beyond the model's rows is an Error naming it. `sampled` [R] I32: ids
  // that the device knows before the host does. Where the backend is asynchronous, a step of one
  // token for each sequence is recorded, filled up to one of a few sizes with rows of zeros.
  tensor::TensorView forward(ops::Backend& backend, std::span<const BatchSequence> batch,
                             KvStore& pages, const ForwardMode& mode = {},
                             const tensor::TensorView& sampled = {});

  // The last batch as attention saw it. Sequences that stand side by side and begin with the same
  // full pages say so in `shared_first` and `shared_pages`.
  const ops::AttentionBatch& attention_batch() const { return attention_batch_; }

  // Where the gradient of the last forward's hidden states may be written, [T, H].
  tensor::TensorView d_hidden() const;

  // Adds the gradients of all trained parameters for d_hidden [T, H] (activation dtype) of the last
  // forward, which had `save` and whole sequences (start 0). The pages must still be held. d_hidden
  // may be overwritten.
  void backward(ops::Backend& backend, const tensor::TensorView& d_hidden, KvStore& pages);

 private:
  // What a recording is for; the batch's layout on the device follows from it.
  struct Step {
    int64_t num_rows = 0;
    int64_t max_context = 0, max_shared_pages = 0;
    bool adapters = true;
    const void* pages = nullptr;
    bool operator==(const Step&) const = default;
  };
  struct RecordedStep {
    Step step;
    std::unique_ptr<ops::Recording> recording;
    int64_t last_use = 0;
  };

  void measure(std::span<const BatchSequence> batch);
  void lay_out(ops::Backend& backend, std::span<const BatchSequence> batch, const Step& step,
               const tensor::TensorView& sampled);
  std::unique_ptr<ops::Recording>& recording_of(const Step& step);
  void run_layers(ops::Backend& backend, KvStore& pages, const ForwardMode& mode);
  void forward_layer(ops::Backend& backend, int64_t index, const LayerActivations& a,
                     const tensor::TensorView& x, const tensor::TensorView& x_branch,
                     KvStore& pages, const ForwardMode& mode);
  void backward_layer(ops::Backend& backend, int64_t index, const tensor::TensorView& d_x,
                      KvStore& pages);
  float attention_scale() const;

  const Model& model_;
  DecoderLimits limits_;
  Activations activations_;
  Projector projector_;
  std::vector<tensor::Buffer> buffers_;
  tensor::TensorView rope_table_;  // [max_context, D] F32
  bool rope_table_ready_ = false;
  tensor::TensorView layout_;  // [capacity] I32: all of a batch, in one upload
  std::vector<int32_t> host_layout_;
  bool can_fill_up_ = false;            // rows of zeros stay zeros
  int64_t quantized_row_elements_ = 0;  // of one row in a forward
  std::vector<RecordedStep> recordings_;
  int64_t num_recorded_ = 0;

  // Of the last batch.
  tensor::TensorView ids_, positions_, slots_;  // [num_tokens_] I32
  ops::AttentionBatch attention_batch_;
  std::vector<int32_t> sequence_offsets_;             // on the host
  std::vector<int32_t> shared_first_, shared_pages_;  // on the host
  int64_t num_tokens_ = 0;                            // with what fills it up
  bool saved_ = false;
};

}  // namespace octet::model
