// The CUDA backend over host arrays: every operand goes to the device, results come back. So the
// oracle's test cases serve the GPU as they are.
#pragma once

#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "ops/backend.h"

namespace octet::parity {

class MirrorBackend final : public ops::Backend {
 public:
  explicit MirrorBackend(std::unique_ptr<ops::Backend> device) : device_(std::move(device)) {}
  ops::Backend& device() { return *device_; }

  std::string name() const override { return device_->name(); }
  tensor::Allocator& allocator() override { return device_->allocator(); }
  void upload(const void*, const tensor::TensorView&) override {}
  void download(const tensor::TensorView&, void*) override {}
  void fill_zero(const tensor::TensorView&) override {}
  int64_t begin_download(const tensor::TensorView&) override { return 0; }
  void end_download(int64_t, void*) override {}
  void synchronize() override { device_->synchronize(); }
  bool is_asynchronous() const override { return device_->is_asynchronous(); }
  ops::QuantizeCounters take_quantize_counters() override {
    return device_->take_quantize_counters();
  }
  void discount_zeros(int64_t num_elements) override { device_->discount_zeros(num_elements); }
  void convert(const tensor::TensorView& from, const tensor::TensorView& to) override;
  void quantize(const ops::QuantizeArgs& args) override;
  void dequantize(const ops::DequantizeArgs& args) override;
  void linear(const ops::LinearArgs& args) override;
  void linear_input_grad(const ops::LinearInputGradArgs& args) override;
  void linear_weight_grad(const ops::LinearWeightGradArgs& args) override;
  void embedding(const ops::EmbeddingArgs& args) override;
  void embedding_backward(const ops::EmbeddingBackwardArgs& args) override;
  void scatter_rows(const ops::ScatterRowsArgs& args) override;
  void add(const ops::AddArgs& args) override;
  void gated_activation(const ops::GatedActivationArgs& args) override;
  void gated_activation_backward(const ops::GatedActivationBackwardArgs& args) override;
  void rms_norm(const ops::RmsNormArgs& args) override;
  void rms_norm_backward(const ops::RmsNormBackwardArgs& args) override;
  void rope(const ops::RopeArgs& args) override;
  void attention_inputs(const ops::AttentionInputsArgs& args) override;
  void kv_append(const ops::KvAppendArgs& args) override;
  void kv_copy(const ops::KvCopyArgs& args) override;
  void attention(const ops::AttentionArgs& args) override;
  void attention_backward(const ops::AttentionBackwardArgs& args) override;
  void log_probs(const ops::LogProbsArgs& args) override;
  void log_probs_backward(const ops::LogProbsBackwardArgs& args) override;
  void sample(const ops::SampleArgs& args) override;
  void adamw(const ops::AdamWArgs& args) override;
  ops::SquaredNorm squared_norm(const tensor::TensorView& x) override;

 private:
  std::unique_ptr<ops::Backend> device_;
};

}  // namespace octet::parity
