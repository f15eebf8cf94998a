// CUDA's ops, one source file per family; src/ops has their contracts.
#pragma once

#include "backend/cuda/context.h"
#include "ops/backend.h"

namespace octet::cuda {

// memory.cu
// Few whole words between the device's memory and the host's pinned memory, by a kernel: a copy
// engine would start later.
void copy_words(Context& context, const void* from, void* to, int64_t count);
void convert(Context& context, const tensor::TensorView& from, const tensor::TensorView& to);
void scatter_rows(Context& context, const ops::ScatterRowsArgs& args);
void embedding(Context& context, const ops::EmbeddingArgs& args);
void embedding_backward(Context& context, const ops::EmbeddingBackwardArgs& args);

// recording.cpp
void run_recorded(Context& context, std::unique_ptr<ops::Recording>& recording,
                  const std::function<void()>& body);

// quantize.cu
void quantize(Context& context, const ops::QuantizeArgs& args);
void dequantize(Context& context, const ops::DequantizeArgs& args);

// linear.cpp, linear_gradients.cpp
void linear(Context& context, const ops::LinearArgs& args);
void linear_input_grad(Context& context, const ops::LinearInputGradArgs& args);
void linear_weight_grad(Context& context, const ops::LinearWeightGradArgs& args);

// elementwise.cu
void add(Context& context, const ops::AddArgs& args);
void gated_activation(Context& context, const ops::GatedActivationArgs& args);
void gated_activation_backward(Context& context, const ops::GatedActivationBackwardArgs& args);
void rope(Context& context, const ops::RopeArgs& args);

// rms_norm.cu
void rms_norm(Context& context, const ops::RmsNormArgs& args);
void rms_norm_backward(Context& context, const ops::RmsNormBackwardArgs& args);

// kv_cache.cu, attention.cu, attention_backward.cu
void kv_append(Context& context, const ops::KvAppendArgs& args);
void kv_copy(Context& context, const ops::KvCopyArgs& args);
void attention(Context& context, const ops::AttentionArgs& args);
void attention_backward(Context& context, const ops::AttentionBackwardArgs& args);

// log_probs.cu, sample.cu
void log_probs(Context& context, const ops::LogProbsArgs& args);
void log_probs_backward(Context& context, const ops::LogProbsBackwardArgs& args);
void sample(Context& context, const ops::SampleArgs& args);

// optimizer.cu
void adamw(Context& context, const ops::AdamWArgs& args);
ops::SquaredNorm squared_norm(Context& context, const tensor::TensorView& x);

}  // namespace octet::cuda
