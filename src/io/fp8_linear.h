// Linear layers of FP8 checkpoints: compressed-tensors (`X.weight_scale`) and the DeepSeek / Qwen3
// style (`X.weight_scale_inv`, which multiplies too). Value = code × scale.
#pragma once

#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "tensor/tensor.h"

namespace octet::io {

struct Fp8Linear {
  tensor::TensorView codes;   // [N, K] E4M3, in the checkpoint's memory
  std::vector<float> scales;  // in the shape tensor::scale_shape(granularity, N, K)
  tensor::Granularity granularity = tensor::Granularity::kTensor;  // kTensor, kRow or kBlock
  float input_scale = 0.0f;  // of static activations; 0: none stored
};

// Whether `module` ("model.layers.0.mlp.up_proj") has an E4M3 weight. Decided by the element type,
// never by quantization_config.
bool is_fp8_linear(const Checkpoint& checkpoint, std::string_view module);

// Codes and scales, counted as used. Errors name the tensor: a weight that is no E4M3 matrix or
// holds NaN, a
// scale that is missing, of another shape or type, not finite or not positive.
Fp8Linear read_fp8_linear(Checkpoint& checkpoint, std::string_view module);

}  // namespace octet::io
