#include "bench/operands.h"

#include <algorithm>

#include "base/rng.h"
#include "tensor/codec.h"

namespace octet::bench {

using tensor::DType;
using tensor::QuantizedView;
using tensor::Shape;
using tensor::TensorView;

TensorView Operands::zeros(DType dtype, const Shape& shape) {
  buffers_.push_back(backend_.allocator().allocate(dtype, shape, "bench"));
  return buffers_.back().view(dtype, shape);
}

TensorView Operands::random(const Shape& shape, double scale) {
  constexpr int64_t kPiece = 1000003;  // a prime: rows of a matrix begin at different places of it
  std::vector<uint16_t> piece(static_cast<size_t>(std::min(kPiece, shape.num_elements())));
  RandomSequence sequence({}, RngUse::kTask);
  for (uint16_t& value : piece) {
    value = tensor::encode_bf16(static_cast<float>(scale * sequence.next_normal()));
  }
  const TensorView out = zeros(DType::kBF16, shape);
  const TensorView flat = out.reshaped({shape.num_elements()});
  for (int64_t at = 0; at < shape.num_elements(); at += kPiece) {
    const int64_t count = std::min<int64_t>(kPiece, shape.num_elements() - at);
    backend_.upload(piece.data(), flat.slice_rows(at, count));
  }
  return out;
}

TensorView Operands::integers(const std::vector<int32_t>& values) {
  const TensorView out = zeros(DType::kI32, {static_cast<int64_t>(values.size())});
  backend_.upload(values.data(), out);
  return out;
}

QuantizedView Operands::quantized(const TensorView& x, tensor::Granularity granularity) {
  const Shape scales = tensor::scale_shape(granularity, x.shape[0], x.shape[1]);
  const QuantizedView out{zeros(DType::kE4M3, x.shape), zeros(DType::kF32, scales), granularity};
  backend_.quantize({.x = x, .column_scale = {}, .out = out});
  return out;
}

}  // namespace octet::bench
