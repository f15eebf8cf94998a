// The CPU's ops, one source file per family; src/ops has their contracts.
#pragma once

#include "backend/cpu/context.h"
#include "ops/backend.h"

namespace octet::cpu {

// convert.cpp
void convert(Context& context, const tensor::TensorView& from, const tensor::TensorView& to);

// quantize.cpp
void quantize(Context& context, const ops::QuantizeArgs& args);
void dequantize(Context& context, const ops::DequantizeArgs& args);

// linear.cpp, linear_input_grad.cpp, linear_weight_grad.cpp
void linear(Context& context, const ops::LinearArgs& args);
void linear_input_grad(Context& context, const ops::LinearInputGradArgs& args);
void linear_weight_grad(Context& context, const ops::LinearWeightGradArgs& args);

// scatter_rows.cpp
void scatter_rows(Context& context, const ops::ScatterRowsArgs& args);

// elementwise.cpp
void embedding(Context& context, const ops::EmbeddingArgs& args);
void embedding_backward(Context& context, const ops::EmbeddingBackwardArgs& args);
void add(Context& context, const ops::AddArgs& args);
void gated_activation(Context& context, const ops::GatedActivationArgs& args);
void gated_activation_backward(Context& context, const ops::GatedActivationBackwardArgs& args);

// rms_norm.cpp
void rms_norm(Context& context, const ops::RmsNormArgs& args);
void rms_norm_backward(Context& context, const ops::RmsNormBackwardArgs& args);

// rope.cpp
void rope(Context& context, const ops::RopeArgs& args);

// attention.cpp
void kv_append(Context& context, const ops::KvAppendArgs& args);
void kv_copy(Context& context, const ops::KvCopyArgs& args);
void attention(Context& context, const ops::AttentionArgs& args);
void attention_backward(Context& context, const ops::AttentionBackwardArgs& args);

// sampling.cpp
void log_probs(Context& context, const ops::LogProbsArgs& args);
void log_probs_backward(Context& context, const ops::LogProbsBackwardArgs& args);
void sample(Context& context, const ops::SampleArgs& args);

// optimizer.cpp
void adamw(Context& context, const ops::AdamWArgs& args);
ops::SquaredNorm squared_norm(Context& context, const tensor::TensorView& x);

}  // namespace octet::cpu
