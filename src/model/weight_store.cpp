#include "model/weight_store.h"

#include "base/error.h"

namespace octet::model {

using tensor::DType;

WeightStore::WeightStore(tensor::Allocator& allocator, const Precision& precision)
    : allocator_(allocator), precision_(precision) {}

Parameter& WeightStore::add(std::string name, tensor::Shape shape, ParameterKind kind,
                            bool trained) {
  OCTET_ASSERT(!by_name_.contains(name));
  Parameter& parameter = parameters_.emplace_back();
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.kind = kind;
  parameter.trained = trained;
  by_name_.emplace(parameter.name, &parameter);

  const bool quantized = kind == ParameterKind::kLinear && precision_.fp8();
  if (trained || precision_.float32) {
    parameter.master_buffer_ = allocator_.allocate(DType::kF32, shape, "master weights");
    parameter.master = parameter.master_buffer_.view(DType::kF32, shape);
  }
  if (quantized) {
    const tensor::Granularity granularity = precision_.weight_granularity();
    const tensor::Shape scales = tensor::scale_shape(granularity, shape[0], shape[1]);
    parameter.codes_buffer_ = allocator_.allocate(DType::kE4M3, shape, "FP8 weights");
    parameter.scales_buffer_ = allocator_.allocate(DType::kF32, scales, "FP8 weights");
    parameter.quantized = {parameter.codes_buffer_.view(DType::kE4M3, shape),
                           parameter.scales_buffer_.view(DType::kF32, scales), granularity};
  } else if (precision_.float32) {
    parameter.dense = parameter.master;
  } else {
    parameter.dense_buffer_ = allocator_.allocate(DType::kBF16, shape, "BF16 weights");
    parameter.dense = parameter.dense_buffer_.view(DType::kBF16, shape);
  }
  if (trained) {
    parameter.gradient_buffer_ = allocator_.allocate(DType::kF32, shape, "gradients");
    parameter.gradient = parameter.gradient_buffer_.view(DType::kF32, shape);
  }
  return parameter;
}

Parameter* WeightStore::find(std::string_view name) {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : found->second;
}

void WeightStore::assign(ops::Backend& backend, Parameter& parameter,
                         const tensor::TensorView& values) {
  OCTET_ASSERT(values.dtype == DType::kF32 && values.shape == parameter.shape);
  if (!parameter.master.empty()) backend.convert(values, parameter.master);
  rebuild(backend, parameter, values);
}

void WeightStore::refresh(ops::Backend& backend) {
  for (Parameter& parameter : parameters_) {
    if (parameter.trained) rebuild(backend, parameter, parameter.master);
  }
  ++policy_version_;
}

void WeightStore::rebuild(ops::Backend& backend, Parameter& parameter,
                          const tensor::TensorView& values) {
  if (!parameter.quantized.empty()) {
    backend.quantize({.x = values,
                      .column_scale = {},
                      .out = parameter.quantized,
                      .scale_format = precision_.scale_format});
  } else if (!precision_.float32) {
    backend.convert(values, parameter.dense);
  }
}

}  // namespace octet::model
