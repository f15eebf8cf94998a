// Where FP8 is used: the precision flow of a run. docs/numerics.md has the table.
#pragma once

#include <string>
#include <string_view>

#include "tensor/tensor.h"

namespace octet::model {

enum class Flow { kBf16, kFp8Lora, kFp8Full };

// The granularity of weights; activations follow (per token, or per token and 128 columns).
enum class WeightScales { kTensor, kChannel, kBlock };

struct Precision {
  Flow flow = Flow::kBf16;
  WeightScales scales = WeightScales::kBlock;
  bool tensor_activations = false;  // one scale per activation tensor: not batch-invariant
  bool dequantize_backward = false;
  bool float32 = false;  // the oracle: float32 arithmetic, nothing rounded on the way (flow bf16)
  tensor::DType gradient_format = tensor::DType::kE4M3;
  tensor::ScaleFormat scale_format = tensor::ScaleFormat::kF32;

  bool fp8() const { return flow != Flow::kBf16; }
  // Whether a sampled log-probability equals the trainer's bit for bit.
  bool exact() const { return !(fp8() && tensor_activations); }
  tensor::DType activation_dtype() const {
    return float32 ? tensor::DType::kF32 : tensor::DType::kBF16;
  }
  tensor::Granularity weight_granularity() const;
  tensor::Granularity activation_granularity() const;
};

// Throw UsageError naming the allowed words.
Flow parse_flow(std::string_view name);
WeightScales parse_weight_scales(std::string_view name);
std::string_view flow_name(Flow flow);
std::string_view weight_scales_name(WeightScales scales);

}  // namespace octet::model
