#include "parity/cuda/mirror_backend.h"

#include <cstring>

namespace octet::parity {
namespace {

using tensor::TensorView;

// The operands of one call. Views of equal extent at one address are one array.
class Call {
 public:
  explicit Call(ops::Backend& device) : device_(device) {}

  void in(TensorView& view) { move(view, false); }
  void out(TensorView& view) { move(view, true); }
  void in(tensor::QuantizedView& view) {
    in(view.codes);
    in(view.scales);
  }
  void out(tensor::QuantizedView& view) {
    out(view.codes);
    out(view.scales);
  }
  void out(ops::KvCacheView& cache) {
    for (TensorView* view : {&cache.k, &cache.v, &cache.k_scale, &cache.v_scale}) out(*view);
  }
  void in(ops::AttentionBatch& batch) {
    for (TensorView* view : {&batch.query_offsets, &batch.context_lengths, &batch.page_table,
                             &batch.shared_first, &batch.shared_pages}) {
      in(*view);
    }
  }
  std::vector<ops::Weight> weights(std::span<const ops::Weight> all) {
    std::vector<ops::Weight> moved(all.begin(), all.end());
    for (ops::Weight& weight : moved) {
      in(weight.dense);
      in(weight.quantized);
    }
    return moved;
  }

  // Results back into the host arrays: rows alone, what lies between them stays.
  void finish() {
    for (Moved& m : moved_) {
      if (!m.is_output) continue;
      std::vector<char> bytes(static_cast<size_t>(m.buffer.num_bytes()));
      device_.download(m.buffer.view(tensor::DType::kU8, {m.buffer.num_bytes()}), bytes.data());
      const int64_t element = tensor::dtype_bytes(m.host.dtype);
      for (int64_t r = 0; r < m.host.rows(); ++r) {
        const int64_t at = r * m.host.row_stride * element;
        std::memcpy(m.host.as<char>() + at, bytes.data() + at,
                    static_cast<size_t>(m.host.row_elements() * element));
      }
    }
  }

 private:
  struct Moved {
    TensorView host;
    tensor::Buffer buffer;
    bool is_output;
  };
  void move(TensorView& view, bool is_output) {
    if (view.empty()) return;
    for (Moved& m : moved_) {
      if (m.host.data != view.data || !(m.host.shape == view.shape) || m.host.dtype != view.dtype) {
        continue;
      }
      m.is_output |= is_output;
      view.data = m.buffer.data();
      return;
    }
    const int64_t bytes = ((view.rows() - 1) * view.row_stride + view.row_elements()) *
                          tensor::dtype_bytes(view.dtype);
    tensor::Buffer buffer = device_.allocator().allocate(std::max<int64_t>(bytes, 0), "operand");
    if (bytes > 0) device_.upload(view.data, buffer.view(tensor::DType::kU8, {bytes}));
    moved_.push_back({view, std::move(buffer), is_output});
    view.data = moved_.back().buffer.data();
  }

  ops::Backend& device_;
  std::vector<Moved> moved_;
};

}  // namespace

void MirrorBackend::convert(const TensorView& from, const TensorView& to) {
  Call call(*device_);
  TensorView a = from, b = to;
  call.in(a);
  call.out(b);
  device_->convert(a, b);
  call.finish();
}

void MirrorBackend::quantize(const ops::QuantizeArgs& args) {
  Call call(*device_);
  ops::QuantizeArgs moved = args;
  call.in(moved.x);
  call.in(moved.column_scale);
  call.out(moved.out);
  device_->quantize(moved);
  call.finish();
}

void MirrorBackend::dequantize(const ops::DequantizeArgs& args) {
  Call call(*device_);
  ops::DequantizeArgs moved = args;
  call.in(moved.x);
  call.out(moved.out);
  device_->dequantize(moved);
  call.finish();
}

void MirrorBackend::linear(const ops::LinearArgs& args) {
  Call call(*device_);
  ops::LinearArgs moved = args;
  const std::vector<ops::Weight> weights = call.weights(args.weights);
  moved.weights = weights;
  call.in(moved.x);
  call.in(moved.xq);
  call.in(moved.bias);
  call.out(moved.y);
  device_->linear(moved);
  call.finish();
}

void MirrorBackend::linear_input_grad(const ops::LinearInputGradArgs& args) {
  Call call(*device_);
  ops::LinearInputGradArgs moved = args;
  const std::vector<ops::Weight> weights = call.weights(args.weights);
  moved.weights = weights;
  call.in(moved.dy);
  call.out(moved.dx);
  device_->linear_input_grad(moved);
  call.finish();
}

void MirrorBackend::linear_weight_grad(const ops::LinearWeightGradArgs& args) {
  Call call(*device_);
  ops::LinearWeightGradArgs moved = args;
  call.in(moved.dy);
  call.in(moved.x);
  call.out(moved.dw);
  call.out(moved.dbias);
  device_->linear_weight_grad(moved);
  call.finish();
}

void MirrorBackend::embedding(const ops::EmbeddingArgs& args) {
  Call call(*device_);
  ops::EmbeddingArgs moved = args;
  call.in(moved.table);
  call.in(moved.ids);
  call.out(moved.out);
  device_->embedding(moved);
  call.finish();
}

void MirrorBackend::embedding_backward(const ops::EmbeddingBackwardArgs& args) {
  Call call(*device_);
  ops::EmbeddingBackwardArgs moved = args;
  call.in(moved.dout);
  call.in(moved.ids);
  call.out(moved.dtable);
  device_->embedding_backward(moved);
  call.finish();
}

void MirrorBackend::scatter_rows(const ops::ScatterRowsArgs& args) {
  Call call(*device_);
  ops::ScatterRowsArgs moved = args;
  call.in(moved.rows);
  call.in(moved.ids);
  call.out(moved.out);
  device_->scatter_rows(moved);
  call.finish();
}

void MirrorBackend::add(const ops::AddArgs& args) {
  Call call(*device_);
  ops::AddArgs moved = args;
  call.in(moved.a);
  call.in(moved.b);
  call.out(moved.out);
  device_->add(moved);
  call.finish();
}

void MirrorBackend::gated_activation(const ops::GatedActivationArgs& args) {
  Call call(*device_);
  ops::GatedActivationArgs moved = args;
  call.in(moved.gate_up);
  call.out(moved.out);
  call.out(moved.quantized.out);
  device_->gated_activation(moved);
  call.finish();
}

void MirrorBackend::gated_activation_backward(const ops::GatedActivationBackwardArgs& args) {
  Call call(*device_);
  ops::GatedActivationBackwardArgs moved = args;
  call.in(moved.dout);
  call.in(moved.gate_up);
  call.out(moved.dgate_up);
  device_->gated_activation_backward(moved);
  call.finish();
}

void MirrorBackend::rms_norm(const ops::RmsNormArgs& args) {
  Call call(*device_);
  ops::RmsNormArgs moved = args;
  for (TensorView* view : {&moved.x, &moved.weight, &moved.branch}) call.in(*view);
  call.out(moved.sum);
  call.out(moved.y);
  call.out(moved.quantized.out);
  device_->rms_norm(moved);
  call.finish();
}

void MirrorBackend::rms_norm_backward(const ops::RmsNormBackwardArgs& args) {
  Call call(*device_);
  ops::RmsNormBackwardArgs moved = args;
  call.in(moved.dy);
  call.in(moved.x);
  call.in(moved.weight);
  call.out(moved.dx);
  call.out(moved.dweight);
  device_->rms_norm_backward(moved);
  call.finish();
}

void MirrorBackend::rope(const ops::RopeArgs& args) {
  Call call(*device_);
  ops::RopeArgs moved = args;
  call.in(moved.x);
  call.in(moved.positions);
  call.in(moved.table);
  call.out(moved.y);
  device_->rope(moved);
  call.finish();
}

void MirrorBackend::attention_inputs(const ops::AttentionInputsArgs& args) {
  Call call(*device_);
  ops::AttentionInputsArgs moved = args;
  for (TensorView* view : {&moved.qkv, &moved.q_norm, &moved.k_norm, &moved.positions,
                           &moved.rope_table, &moved.slots}) {
    call.in(*view);
  }
  call.out(moved.q_out);
  call.out(moved.k_out);
  call.out(moved.cache);
  device_->attention_inputs(moved);
  call.finish();
}

void MirrorBackend::kv_append(const ops::KvAppendArgs& args) {
  Call call(*device_);
  ops::KvAppendArgs moved = args;
  call.in(moved.k);
  call.in(moved.v);
  call.in(moved.slots);
  call.out(moved.cache);
  device_->kv_append(moved);
  call.finish();
}

void MirrorBackend::kv_copy(const ops::KvCopyArgs& args) {
  Call call(*device_);
  ops::KvCopyArgs moved = args;
  call.out(moved.cache);
  device_->kv_copy(moved);
  call.finish();
}

void MirrorBackend::attention(const ops::AttentionArgs& args) {
  Call call(*device_);
  ops::AttentionArgs moved = args;
  call.in(moved.q);
  call.out(moved.cache);
  call.in(moved.batch);
  call.out(moved.out);
  call.out(moved.lse);
  call.out(moved.quantized.out);
  device_->attention(moved);
  call.finish();
}

void MirrorBackend::attention_backward(const ops::AttentionBackwardArgs& args) {
  Call call(*device_);
  ops::AttentionBackwardArgs moved = args;
  for (TensorView* view : {&moved.q, &moved.out, &moved.lse, &moved.dout}) call.in(*view);
  call.out(moved.cache);
  call.in(moved.batch);
  for (TensorView* view : {&moved.dq, &moved.dk, &moved.dv}) call.out(*view);
  device_->attention_backward(moved);
  call.finish();
}

void MirrorBackend::log_probs(const ops::LogProbsArgs& args) {
  Call call(*device_);
  ops::LogProbsArgs moved = args;
  call.in(moved.logits);
  call.in(moved.targets);
  call.out(moved.log_probs);
  call.out(moved.entropy);
  device_->log_probs(moved);
  call.finish();
}

void MirrorBackend::log_probs_backward(const ops::LogProbsBackwardArgs& args) {
  Call call(*device_);
  ops::LogProbsBackwardArgs moved = args;
  for (TensorView* view : {&moved.logits, &moved.targets, &moved.dlog_probs, &moved.dentropy}) {
    call.in(*view);
  }
  call.out(moved.dlogits);
  device_->log_probs_backward(moved);
  call.finish();
}

void MirrorBackend::sample(const ops::SampleArgs& args) {
  Call call(*device_);
  ops::SampleArgs moved = args;
  call.in(moved.logits);
  call.out(moved.ids);
  call.out(moved.log_probs);
  call.out(moved.kept_log_probs);
  device_->sample(moved);
  call.finish();
}

void MirrorBackend::adamw(const ops::AdamWArgs& args) {
  Call call(*device_);
  ops::AdamWArgs moved = args;
  call.in(moved.gradient);
  for (TensorView* view : {&moved.master, &moved.first_moment, &moved.second_moment}) {
    call.out(*view);
  }
  device_->adamw(moved);
  call.finish();
}

ops::SquaredNorm MirrorBackend::squared_norm(const TensorView& x) {
  Call call(*device_);
  TensorView moved = x;
  call.in(moved);
  return device_->squared_norm(moved);
}

}  // namespace octet::parity
