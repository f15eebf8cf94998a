#include "tensor/tensor.h"

#include <algorithm>

#include <fmt/format.h>

namespace octet::tensor {

int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16:
    case DType::kU16:
      return 2;
    default:
      return 1;
  }
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kE4M3:
      return "F8_E4M3";
    case DType::kE5M2:
      return "F8_E5M2";
    case DType::kE8M0:
      return "F8_E8M0";
    case DType::kF64:
      return "F64";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kU32:
      return "U32";
    case DType::kI16:
      return "I16";
    case DType::kU16:
      return "U16";
    case DType::kI8:
      return "I8";
    case DType::kU8:
      return "U8";
    case DType::kBool:
      return "BOOL";
  }
  return "?";
}

Shape::Shape(std::initializer_list<int64_t> extents)
    : Shape(std::span(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const int64_t> extents) : rank_(static_cast<int>(extents.size())) {
  OCTET_ASSERT(extents.size() <= kMaxRank);
  std::copy(extents.begin(), extents.end(), extents_.begin());
}

int64_t Shape::num_elements() const {
  int64_t product = 1;
  for (int axis = 0; axis < rank_; ++axis) product *= extents_[axis];
  return product;
}

bool Shape::operator==(const Shape& other) const {
  return rank_ == other.rank_ &&
         std::equal(extents_.begin(), extents_.begin() + rank_, other.extents_.begin());
}

std::string Shape::to_string() const {
  return fmt::format("[{}]", fmt::join(extents_.begin(), extents_.begin() + rank_, ", "));
}

TensorView::TensorView(void* data, DType dtype, Shape shape)
    : data(data), dtype(dtype), shape(shape), row_stride(row_elements()) {}

TensorView::TensorView(void* data, DType dtype, Shape shape, int64_t row_stride)
    : data(data), dtype(dtype), shape(shape), row_stride(row_stride) {}

int64_t TensorView::row_elements() const {
  int64_t product = 1;
  for (int axis = 1; axis < shape.rank(); ++axis) product *= shape[axis];
  return product;
}

TensorView TensorView::slice_rows(int64_t begin, int64_t count) const {
  OCTET_ASSERT(begin >= 0 && count >= 0 && begin + count <= rows());
  TensorView view = *this;
  std::array<int64_t, Shape::kMaxRank> extents{};
  for (int axis = 0; axis < shape.rank(); ++axis) extents[axis] = shape[axis];
  extents[0] = count;
  view.shape = Shape(std::span<const int64_t>(extents.data(), shape.rank()));
  view.data = static_cast<char*>(data) + begin * row_stride * dtype_bytes(dtype);
  return view;
}

TensorView TensorView::slice_columns(int64_t begin, int64_t count) const {
  OCTET_ASSERT(shape.rank() == 2 && begin >= 0 && begin + count <= shape[1]);
  return TensorView(static_cast<char*>(data) + begin * dtype_bytes(dtype), dtype, {shape[0], count},
                    row_stride);
}

TensorView TensorView::reshaped(Shape new_shape) const {
  OCTET_ASSERT(new_shape.num_elements() == num_elements());
  if (contiguous()) return TensorView(data, dtype, new_shape);
  OCTET_ASSERT(new_shape.rank() > 0 && new_shape[0] == shape[0]);
  return TensorView(data, dtype, new_shape, row_stride);
}

std::string_view granularity_name(Granularity granularity) {
  switch (granularity) {
    case Granularity::kTensor:
      return "tensor";
    case Granularity::kRow:
      return "row";
    case Granularity::kBlock:
      return "block";
    case Granularity::kRowBlock:
      return "row_block";
  }
  return "?";
}

Shape scale_shape(Granularity granularity, int64_t rows, int64_t columns) {
  const auto blocks = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
  switch (granularity) {
    case Granularity::kTensor:
      return {1};
    case Granularity::kRow:
      return {rows};
    case Granularity::kBlock:
      return {blocks(rows), blocks(columns)};
    case Granularity::kRowBlock:
      return {rows, blocks(columns)};
  }
  return {};
}

}  // namespace octet::tensor
