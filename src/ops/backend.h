// The contract every backend fulfils: one function per op. Views point into the backend's memory;
// spans are host memory and are read before the call returns. Calls are queued in order; only
// `download`, `end_download`, `squared_norm`, `take_quantize_counters` and `synchronize` wait.
// Shapes and dtypes are checked (octet::Error naming the op) before work is queued. One caller
// thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/optimizer.h"
#include "ops/quantize.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/sampling.h"
#include "ops/workspace.h"
#include "tensor/buffer.h"

namespace octet::ops {

// What a backend remembers of a sequence of calls.
class Recording {
 public:
  virtual ~Recording() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // with what decides its bytes, as "cpu (avx512)"
  // What was chosen by timing, as JSON, or nothing: a run keeps it. It decides no bytes.
  virtual std::string choices() const { return {}; }
  virtual tensor::Allocator& allocator() = 0;

  // Finds out what ops of this shape will need to know, such as the fastest kernels for them, where
  // it is not known yet; takes `prepare_bytes` of the allocator at most and gives them back. Before
  // anything else is allocated; without it ops find out as they run.
  virtual int64_t prepare_bytes(const WorkspaceShape&) { return 0; }
  virtual void prepare(const WorkspaceShape&) {}
  // What ops of this shape will take of the allocator for themselves, in whole pages.
  virtual std::vector<Workspace> workspaces(const WorkspaceShape&) { return {}; }
  // What the device itself says is in use since the backend was made: the allocator's bytes and
  // what code and recordings take. Without a device to ask, the allocator's.
  virtual int64_t device_bytes_in_use() { return allocator().bytes_in_use(); }
  virtual int64_t device_peak_bytes() { return allocator().peak_bytes(); }

  // Memory. Views are contiguous; host arrays hold at least the view's bytes.
  virtual void upload(const void* host, const tensor::TensorView& to) = 0;
  // `read` gives the view's bytes from `offset` on, piece by piece; several threads may call it at
  // once, each byte is asked for once, and all are read on return. What it throws is thrown here.
  using ReadPiece = std::function<void(int64_t offset, std::span<uint8_t> to)>;
  virtual void upload_pieces(const tensor::TensorView& to, const ReadPiece& read);
  virtual void download(const tensor::TensorView& from, void* host) = 0;
  // A download in two halves: the copy is queued, and `end_download` waits for it alone. Of the
  // downloads begun, the last kMaxDownloads can be ended, each once; older ones are forgotten.
  static constexpr int kMaxDownloads = 4;
  virtual int64_t begin_download(const tensor::TensorView& from) = 0;  // returns a ticket
  virtual void end_download(int64_t ticket, void* host) = 0;
  virtual void fill_zero(const tensor::TensorView& out) = 0;
  virtual void convert(
      const tensor::TensorView& from,
      const tensor::TensorView& to) = 0;  // of F32, BF16; equal shapes, strided rows allowed
  virtual void synchronize() = 0;
  // Seconds of one call of `body` when `repeats` of them follow each other, by the device's clock
  // where it has one; waits. By default by the host's.
  virtual double time_seconds(const std::function<void()>& body, int repeats);
  // Whether work goes on after a call returns: then it pays to queue ahead, and to repeat the same
  // shapes so that `run_recorded` finds its recording.
  virtual bool is_asynchronous() const = 0;

  virtual void quantize(const QuantizeArgs& args) = 0;
  virtual void dequantize(const DequantizeArgs& args) = 0;
  virtual QuantizeCounters take_quantize_counters() = 0;  // since the last call, then zero
  // Leaves zeros that only filled up a batch, and were quantised with it, out of the counters.
  virtual void discount_zeros(int64_t num_elements) = 0;

  virtual void linear(const LinearArgs& args) = 0;
  virtual void linear_input_grad(const LinearInputGradArgs& args) = 0;
  virtual void linear_weight_grad(const LinearWeightGradArgs& args) = 0;

  virtual void embedding(const EmbeddingArgs& args) = 0;
  virtual void embedding_backward(const EmbeddingBackwardArgs& args) = 0;
  virtual void scatter_rows(const ScatterRowsArgs& args) = 0;
  virtual void add(const AddArgs& args) = 0;
  virtual void gated_activation(const GatedActivationArgs& args) = 0;
  virtual void gated_activation_backward(const GatedActivationBackwardArgs& args) = 0;
  virtual void rms_norm(const RmsNormArgs& args) = 0;
  virtual void rms_norm_backward(const RmsNormBackwardArgs& args) = 0;
  virtual void rope(const RopeArgs& args) = 0;

  // By default rms_norm, rope and kv_append one after the other.
  virtual void attention_inputs(const AttentionInputsArgs& args);
  virtual void kv_append(const KvAppendArgs& args) = 0;
  virtual void kv_copy(const KvCopyArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;
  virtual void attention_backward(const AttentionBackwardArgs& args) = 0;

  virtual void log_probs(const LogProbsArgs& args) = 0;
  virtual void log_probs_backward(const LogProbsBackwardArgs& args) = 0;
  virtual void sample(const SampleArgs& args) = 0;

  virtual void adamw(const AdamWArgs& args) = 0;
  virtual SquaredNorm squared_norm(const tensor::TensorView& x) = 0;

  // Runs `body`; a backend that can keeps its calls in `recording` and from then on queues them
  // again without it. So `body` must make the same calls each time, on the same memory with the
  // same arguments, without uploads and without waiting; what it reads may change in between. The
  // recording must not outlive the backend.
  virtual void run_recorded(std::unique_ptr<Recording>& recording,
                            const std::function<void()>& body);

 protected:
  // What QuantizedOutput asks for, by `quantize`.
  void quantize_output(const tensor::TensorView& dense, const QuantizedOutput& output);
};

}  // namespace octet::ops
