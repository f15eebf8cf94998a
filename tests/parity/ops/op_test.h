// What the op tests share: host arrays of any element type, seeded values, comparisons.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "base/rng.h"
#include "parity/ops/tolerances.h"
#include "support/cpu_isas.h"
#include "tensor/codec.h"
#include "tensor/tensor.h"

namespace octet::parity {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

// An owned array; `row_stride` larger than a row makes it a slice of wider rows.
class Array {
 public:
  Array() = default;
  Array(DType dtype, const Shape& shape, int64_t padding = 0) {
    TensorView contiguous(nullptr, dtype, shape);
    const int64_t stride = contiguous.row_elements() + padding;
    bytes_.assign(static_cast<size_t>(contiguous.rows() * stride * tensor::dtype_bytes(dtype)), 0);
    view_ = TensorView(bytes_.data(), dtype, shape, stride);
  }
  Array(DType dtype, const Shape& shape, const std::vector<double>& values, int64_t padding = 0)
      : Array(dtype, shape, padding) {
    for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
  }
  Array(const std::vector<int32_t>& values)
      : Array(DType::kI32, Shape{static_cast<int64_t>(values.size())}) {
    std::memcpy(bytes_.data(), values.data(), bytes_.size());
  }
  Array(Array&&) = default;
  Array& operator=(Array&&) = default;

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }

  double get(int64_t index) const {
    const int64_t at = offset(index);
    switch (view_.dtype) {
      case DType::kF32:
        return view_.as<float>()[at];
      case DType::kBF16:
        return tensor::decode_bf16(view_.as<uint16_t>()[at]);
      case DType::kI32:
        return view_.as<int32_t>()[at];
      default:
        return tensor::decode_e4m3(view_.as<uint8_t>()[at]);
    }
  }
  void set(int64_t index, double value) {
    const int64_t at = offset(index);
    const auto single = static_cast<float>(value);
    if (view_.dtype == DType::kF32) {
      view_.as<float>()[at] = single;
    } else if (view_.dtype == DType::kBF16) {
      view_.as<uint16_t>()[at] = tensor::encode_bf16(single);
    } else {
      view_.as<int32_t>()[at] = static_cast<int32_t>(value);
    }
  }
  std::vector<double> values() const {
    std::vector<double> result(static_cast<size_t>(view_.num_elements()));
    for (size_t i = 0; i < result.size(); ++i) result[i] = get(static_cast<int64_t>(i));
    return result;
  }
  // Padding included.
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  int64_t offset(int64_t index) const {
    const int64_t row = view_.row_elements();
    return index / row * view_.row_stride + index % row;
  }
  std::vector<char> bytes_;
  TensorView view_;
};

// Standard normal values, scaled.
inline std::vector<double> normal_values(int64_t count, uint32_t seed, double scale = 1) {
  RandomSequence random({.seed = seed}, RngUse::kInit);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = scale * random.next_normal();
  return values;
}

inline Array random_array(DType dtype, const Shape& shape, uint32_t seed, double scale = 1,
                          int64_t padding = 0) {
  return Array(dtype, shape, normal_values(shape.num_elements(), seed, scale), padding);
}

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                        Tolerance tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double bound = tolerance.absolute + tolerance.relative * std::fabs(expected[i]);
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    if (actual[i] == expected[i]) continue;  // infinities too
    if (!(std::fabs(actual[i] - expected[i]) <= bound)) {
      ADD_FAILURE() << what << ": element " << i << " is " << actual[i] << ", expected "
                    << expected[i] << " within " << bound;
      return;
    }
  }
}

// Every test runs on each instruction set of this processor.
class OpTest : public ::testing::TestWithParam<cpu::Isa> {
 protected:
  static std::unique_ptr<ops::Backend> make_backend(int num_threads = 1) {
    return cpu::make_cpu_backend({.num_threads = num_threads, .isa = GetParam()});
  }
  std::unique_ptr<ops::Backend> backend_ = make_backend();
};

inline std::string isa_of(const ::testing::TestParamInfo<cpu::Isa>& info) {
  return std::string(cpu::isa_name(info.param));
}

}  // namespace octet::parity
