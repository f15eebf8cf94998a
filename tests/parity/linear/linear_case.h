// Random operands for the linear products, and their float64 references from decoded values.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "parity/tolerances.h"
#include "support/cpu_isas.h"
#include "tensor/codec.h"

namespace octet::test {

using tensor::DType;
using tensor::Granularity;
using tensor::QuantizedView;
using tensor::ScaleFormat;
using tensor::TensorView;

// An owned matrix inside wider rows; what lies beside the view holds 1e4.
struct Matrix {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  std::vector<char> bytes;

  Matrix() = default;
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t margin = 3)
      : dtype(dtype), rows(rows), columns(columns), stride(columns + margin) {
    // One row of margin on each end.
    bytes.resize((rows + 2) * stride * tensor::dtype_bytes(dtype));
    const TensorView all(bytes.data(), dtype, {rows + 2, stride});
    for (int64_t r = 0; r < rows + 2; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        const bool inside = r >= 1 && r <= rows && c < columns;
        set(all, r, c, inside ? 0.0f : 1e4f);
      }
    }
  }
  static void set(const TensorView& view, int64_t r, int64_t c, float value) {
    if (view.dtype == DType::kF32) {
      view.row<float>(r)[c] = value;
    } else {
      view.row<uint16_t>(r)[c] = tensor::encode_bf16(value);
    }
  }
  TensorView view() {
    return TensorView(bytes.data() + stride * tensor::dtype_bytes(dtype), dtype, {rows, columns},
                      stride);
  }
  void set(int64_t r, int64_t c, float value) { set(view(), r, c, value); }
  float at(int64_t r, int64_t c) {
    return dtype == DType::kF32 ? view().row<float>(r)[c]
                                : tensor::decode_bf16(view().row<uint16_t>(r)[c]);
  }
  Matrix& fill_normal(std::mt19937& random, float deviation = 1.0f) {
    std::normal_distribution<float> normal(0.0f, deviation);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) set(r, c, normal(random));
    }
    return *this;
  }
  // True if everything beside the view still holds what the constructor put there.
  bool margin_untouched() {
    const TensorView all(bytes.data(), dtype, {rows + 2, stride});
    for (int64_t r = 0; r < rows + 2; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        if (r >= 1 && r <= rows && c < columns) continue;
        const float value = dtype == DType::kF32 ? all.row<float>(r)[c]
                                                 : tensor::decode_bf16(all.row<uint16_t>(r)[c]);
        if (value != tensor::round_bf16(1e4f) && value != 1e4f) return false;
      }
    }
    return true;
  }
};

// Owned codes and scales of a matrix.
struct Codes {
  DType format = DType::kE4M3;
  Granularity granularity = Granularity::kRow;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  Codes() = default;
  Codes(ops::Backend& backend, const TensorView& x, Granularity granularity,
        DType format = DType::kE4M3)
      : format(format), granularity(granularity), rows(x.shape[0]), columns(x.shape[1]) {
    codes.resize(rows * columns);
    scales.resize(tensor::scale_shape(granularity, rows, columns).num_elements());
    backend.quantize({.x = x, .column_scale = {}, .out = view()});
  }
  QuantizedView view() {
    return {TensorView(codes.data(), format, {rows, columns}),
            TensorView(scales.data(), DType::kF32, tensor::scale_shape(granularity, rows, columns)),
            granularity};
  }
  double at(int64_t r, int64_t c) const {
    const int64_t blocks = (columns + 127) / 128;
    const int64_t group = granularity == Granularity::kTensor  ? 0
                          : granularity == Granularity::kRow   ? r
                          : granularity == Granularity::kBlock ? r / 128 * blocks + c / 128
                                                               : r * blocks + c / 128;
    const uint8_t code = codes[r * columns + c];
    const float value =
        format == DType::kE4M3 ? tensor::decode_e4m3(code) : tensor::decode_e5m2(code);
    return static_cast<double>(value) * scales[group];
  }
};

// How a weight is held: dense, or quantised with this granularity.
enum class WeightFormat { kF32, kBf16, kTensor, kChannel, kBlock };
inline constexpr WeightFormat kWeightFormats[] = {WeightFormat::kF32, WeightFormat::kBf16,
                                                  WeightFormat::kTensor, WeightFormat::kChannel,
                                                  WeightFormat::kBlock};
inline std::string format_name(WeightFormat format) {
  const char* names[] = {"f32", "bf16", "tensor", "channel", "block"};
  return names[static_cast<int>(format)];
}
inline bool is_fp8(WeightFormat format) { return format >= WeightFormat::kTensor; }
inline Granularity weight_granularity(WeightFormat format) {
  return format == WeightFormat::kTensor    ? Granularity::kTensor
         : format == WeightFormat::kChannel ? Granularity::kRow
                                            : Granularity::kBlock;
}
inline Granularity activation_granularity(WeightFormat format) {
  return format == WeightFormat::kBlock ? Granularity::kRowBlock : Granularity::kRow;
}

struct OwnedWeight {
  Matrix dense;
  Codes codes;
  bool quantized = false;

  OwnedWeight(ops::Backend& backend, WeightFormat format, Matrix values) {
    quantized = is_fp8(format);
    if (quantized) {
      codes = Codes(backend, values.view(), weight_granularity(format));
    } else {
      dense = std::move(values);
    }
  }
  ops::Weight weight() {
    ops::Weight result;
    if (quantized) {
      result.quantized = codes.view();
    } else {
      result.dense = dense.view();
    }
    return result;
  }
  double at(int64_t n, int64_t k) { return quantized ? codes.at(n, k) : dense.at(n, k); }
  int64_t rows() const { return quantized ? codes.rows : dense.rows; }
};

inline Matrix normal_matrix(DType dtype, int64_t rows, int64_t columns, std::mt19937& random,
                            float deviation = 1.0f) {
  return std::move(Matrix(dtype, rows, columns).fill_normal(random, deviation));
}

// Compares all of `actual` with expected(row, column), whose terms' magnitudes add up to
// magnitude(row, column).
template <class Expected>
void expect_close(Matrix& actual, const Expected& expected, Tolerance tolerance) {
  for (int64_t r = 0; r < actual.rows; ++r) {
    for (int64_t c = 0; c < actual.columns; ++c) {
      const auto [value, magnitude] = expected(r, c);
      ASSERT_TRUE(within(actual.at(r, c), value, tolerance, magnitude))
          << "[" << r << ", " << c << "] is " << actual.at(r, c) << ", expected " << value;
    }
  }
  EXPECT_TRUE(actual.margin_untouched());
}

// All values of a Matrix, Codes or OwnedWeight, row by row.
template <class Values>
std::vector<double> decoded(Values& values, int64_t rows, int64_t columns) {
  std::vector<double> all;
  all.reserve(rows * columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) all.push_back(values.at(r, c));
  }
  return all;
}

struct Sum {
  double value = 0;
  double magnitude = 0;
  void add(double term) {
    value += term;
    magnitude += std::fabs(term);
  }
};

}  // namespace octet::test
