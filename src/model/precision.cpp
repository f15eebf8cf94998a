#include "model/precision.h"

#include "base/error.h"

namespace octet::model {

using tensor::Granularity;

Granularity Precision::weight_granularity() const {
  switch (scales) {
    case WeightScales::kTensor:
      return Granularity::kTensor;
    case WeightScales::kChannel:
      return Granularity::kRow;
    case WeightScales::kBlock:
      return Granularity::kBlock;
  }
  return Granularity::kBlock;
}

Granularity Precision::activation_granularity() const {
  if (tensor_activations) return Granularity::kTensor;
  return scales == WeightScales::kBlock ? Granularity::kRowBlock : Granularity::kRow;
}

Flow parse_flow(std::string_view name) {
  for (const Flow flow : {Flow::kBf16, Flow::kFp8Lora, Flow::kFp8Full}) {
    if (name == flow_name(flow)) return flow;
  }
  fail_usage("flow", "must be bf16, fp8_lora or fp8_full, but is \"{}\"", name);
}

WeightScales parse_weight_scales(std::string_view name) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    if (name == weight_scales_name(scales)) return scales;
  }
  fail_usage("load_in_fp8", "must be tensor, channel or block, but is \"{}\"", name);
}

std::string_view flow_name(Flow flow) {
  return flow == Flow::kBf16 ? "bf16" : flow == Flow::kFp8Lora ? "fp8_lora" : "fp8_full";
}

std::string_view weight_scales_name(WeightScales scales) {
  return scales == WeightScales::kTensor    ? "tensor"
         : scales == WeightScales::kChannel ? "channel"
                                            : "block";
}

}  // namespace octet::model
