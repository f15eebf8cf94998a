#include "model/weight_store.h"

#include <algorithm>

#include "base/error.h"

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

namespace {

// The next [rows, K] of a group.
TensorView take(WeightGroup& group, DType dtype, const tensor::Shape& shape) {
  const int64_t bytes = tensor::dtype_bytes(dtype);
  const TensorView view(static_cast<char*>(group.elements.data()) + bytes * group.elements_used,
                        dtype, shape);
  group.elements_used += shape.num_elements();
  OCTET_ASSERT(bytes * group.elements_used <= group.elements.num_bytes());
  return view;
}

}  // namespace

WeightStore::WeightStore(tensor::Allocator& allocator, const Precision& precision)
    : allocator_(allocator), precision_(precision) {}

WeightGroup& WeightStore::add_group(std::initializer_list<int64_t> rows, int64_t columns) {
  WeightGroup& group = groups_.emplace_back();
  const tensor::Granularity granularity = precision_.weight_granularity();
  int64_t elements = 0, scales = 0;
  for (const int64_t count : rows) {
    elements += count * columns;
    scales += granularity == tensor::Granularity::kTensor
                  ? count
                  : tensor::scale_shape(granularity, count, columns).num_elements();
  }
  if (precision_.fp8()) {
    group.elements = allocator_.allocate(DType::kE4M3, {elements}, "FP8 weights");
    group.scales = allocator_.allocate(DType::kF32, {scales}, "FP8 weights");
  } else if (!precision_.float32) {
    group.elements = allocator_.allocate(DType::kBF16, {elements}, "BF16 weights");
  }
  return group;
}

Parameter& WeightStore::add(std::string name, tensor::Shape shape, ParameterKind kind, bool trained,
                            WeightGroup* group) {
  OCTET_ASSERT(!by_name_.contains(name));
  Parameter& parameter = parameters_.emplace_back();
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.kind = kind;
  parameter.trained = trained;
  by_name_.emplace(parameter.name, &parameter);

  const bool linear = kind == ParameterKind::kLinear;
  if (trained || precision_.float32) {
    parameter.master_buffer_ = allocator_.allocate(DType::kF32, shape, "master weights");
    parameter.master = parameter.master_buffer_.view(DType::kF32, shape);
  }
  if (linear && group == nullptr) group = &add_group({shape[0]}, shape[1]);
  if (linear && precision_.fp8()) {
    const tensor::Granularity granularity = precision_.weight_granularity();
    const tensor::Shape scale_shape = tensor::scale_shape(granularity, shape[0], shape[1]);
    auto* scales = static_cast<float*>(group->scales.data()) + group->scales_used;
    if (granularity == tensor::Granularity::kTensor) {
      parameter.scale_buffer_ = allocator_.allocate(DType::kF32, scale_shape, "FP8 weights");
      parameter.row_scales = {scales, DType::kF32, {shape[0]}};
      group->scales_used += shape[0];
      scales = static_cast<float*>(parameter.scale_buffer_.data());
    } else {
      group->scales_used += scale_shape.num_elements();
    }
    parameter.quantized = {
        take(*group, DType::kE4M3, shape), {scales, DType::kF32, scale_shape}, granularity};
    OCTET_ASSERT(4 * group->scales_used <= group->scales.num_bytes());
  } else if (precision_.float32) {
    parameter.dense = parameter.master;
  } else if (linear) {
    parameter.dense = take(*group, DType::kBF16, shape);
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

void WeightStore::assign_codes(ops::Backend& backend, Parameter& parameter, const void* codes,
                               const float* scales) {
  OCTET_ASSERT(parameter.master.empty() && !parameter.quantized.empty());
  backend.upload(codes, parameter.quantized.codes);
  backend.upload(scales, parameter.quantized.scales);
  spread_scale(backend, parameter);
}

void WeightStore::spread_scale(ops::Backend& backend, const Parameter& parameter) {
  if (parameter.row_scales.empty()) return;
  const int64_t rows = parameter.shape[0];
  // Row by row from a view whose rows are all the same one.
  backend.convert(TensorView(parameter.quantized.scales.data, DType::kF32, {rows, 1}, 0),
                  TensorView(parameter.row_scales.data, DType::kF32, {rows, 1}));
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
    spread_scale(backend, parameter);
  } else if (!precision_.float32) {
    backend.convert(values, parameter.dense.slice_rows(first_row, rows));
  }
}

}  // namespace octet::model
