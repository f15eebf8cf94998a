// Operands with random values, made once and repeated, so that gigabytes of them cost little.
#pragma once

#include <vector>

#include "ops/backend.h"

namespace octet::bench {

class Operands {
 public:
  explicit Operands(ops::Backend& backend) : backend_(backend) {}

  // Zeros; the memory lives as long as this object.
  tensor::TensorView zeros(tensor::DType dtype, const tensor::Shape& shape);
  // Normal values times `scale`, BF16.
  tensor::TensorView random(const tensor::Shape& shape, double scale = 1);
  tensor::TensorView integers(const std::vector<int32_t>& values);
  // A matrix's codes and scales, E4M3.
  tensor::QuantizedView quantized(const tensor::TensorView& x, tensor::Granularity granularity);

 private:
  ops::Backend& backend_;
  std::vector<tensor::Buffer> buffers_;
};

}  // namespace octet::bench
