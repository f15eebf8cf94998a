#include "model/weight_store.h"

#include <algorithm>

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

int64_t WeightStore::row_granule(const Parameter& parameter) {
  if (parameter.quantized.empty()) return 1;
  switch (parameter.quantized.granularity) {
    case tensor::Granularity::kRow:
      return 1;
    case tensor::Granularity::kBlock:
      return tensor::kScaleBlock;
    default:
      return parameter.shape[0];
  }
}

void WeightStore::assign(ops::Backend& backend, Parameter& parameter,
                         const tensor::TensorView& values, int64_t first_row) {
  OCTET_ASSERT(values.row_elements() ==
               parameter.shape.num_elements() / std::max<int64_t>(1, parameter.shape[0]));
  OCTET_ASSERT(first_row % row_granule(parameter) == 0 &&
               first_row + values.rows() <= parameter.shape[0]);
  OCTET_ASSERT(values.rows() % row_granule(parameter) == 0 ||
               first_row + values.rows() == parameter.shape[0]);
  if (parameter.master.empty()) return rebuild(backend, parameter, values, first_row);
  const tensor::TensorView master = parameter.master.slice_rows(first_row, values.rows());
  backend.convert(values, master);
  rebuild(backend, parameter, master, first_row);
}

void WeightStore::refresh(ops::Backend& backend) {
  for (Parameter& parameter : parameters_) {
    if (parameter.trained) rebuild(backend, parameter, parameter.master, 0);
  }
  ++policy_version_;
}

void WeightStore::rebuild(ops::Backend& backend, const Parameter& parameter,
                          const tensor::TensorView& values, int64_t first_row) {
  const int64_t rows = values.rows();
  if (!parameter.quantized.empty()) {
    tensor::QuantizedView out = parameter.quantized;
    out.codes = out.codes.slice_rows(first_row, rows);
    if (out.granularity != tensor::Granularity::kTensor) {
      const int64_t granule = row_granule(parameter);
      out.scales = out.scales.slice_rows(first_row / granule, (rows + granule - 1) / granule);
    }
    backend.quantize(
        {.x = values, .column_scale = {}, .out = out, .scale_format = precision_.scale_format});
  } else if (!precision_.float32) {
    backend.convert(values, parameter.dense.slice_rows(first_row, rows));
  }
}

}  // namespace octet::model
