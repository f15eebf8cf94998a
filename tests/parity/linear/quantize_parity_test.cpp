// The vector quantiser against the scalar definition, hostile values and tails included.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "base/error.h"
#include "support/cpu_isas.h"
#include "tensor/codec.h"

namespace octet {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::ScaleFormat;
using tensor::TensorView;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Values over the whole range of BF16, both signs, with the special ones strewn in.
std::vector<float> hostile_values(int64_t count, uint32_t seed) {
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, -kNaN, 1e-45f, 3e38f};
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t exponent = 97 + (seed >> 24) % 50;
    value = std::bit_cast<float>((seed & 0x80000000u) | exponent << 23 | (seed >> 3 & 0x7FFFFFu));
    if (seed >> 8 & 1 && (seed >> 9 & 15) == 0) value = special[seed >> 13 & 7];
  }
  return values;
}

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Quantized quantize(ops::Backend& backend, const TensorView& x, Granularity granularity,
                   DType format, ScaleFormat scale_format, const TensorView& column_scale = {}) {
  Quantized out;
  const tensor::Shape shape = tensor::scale_shape(granularity, x.shape[0], x.shape[1]);
  out.codes.resize(x.num_elements());
  out.scales.resize(shape.num_elements());
  backend.quantize({.x = x,
                    .column_scale = column_scale,
                    .out = {TensorView(out.codes.data(), format, x.shape),
                            TensorView(out.scales.data(), DType::kF32, shape), granularity},
                    .scale_format = scale_format});
  return out;
}

int64_t group_of(Granularity granularity, int64_t row, int64_t column, int64_t columns) {
  const int64_t blocks = (columns + 127) / 128;
  switch (granularity) {
    case Granularity::kTensor:
      return 0;
    case Granularity::kRow:
      return row;
    case Granularity::kBlock:
      return row / 128 * blocks + column / 128;
    case Granularity::kRowBlock:
      return row * blocks + column / 128;
  }
  return 0;
}

// The definition in src/ops/quantize.h, one value at a time.
Quantized reference(const TensorView& x, Granularity granularity, DType format,
                    ScaleFormat scale_format, const std::vector<float>& column_scale,
                    ops::QuantizeCounters& counters) {
  const int64_t rows = x.shape[0];
  const int64_t columns = x.shape[1];
  Quantized out;
  out.codes.resize(rows * columns);
  out.scales.assign(tensor::scale_shape(granularity, rows, columns).num_elements(), 0.0f);
  const auto value = [&](int64_t row, int64_t column) {
    const float read = x.dtype == DType::kF32 ? tensor::round_bf16(x.row<float>(row)[column])
                                              : tensor::decode_bf16(x.row<uint16_t>(row)[column]);
    return column_scale.empty() ? read : read * column_scale[column];
  };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      float& amax = out.scales[group_of(granularity, row, column, columns)];
      if (std::isfinite(value(row, column))) amax = std::max(amax, std::fabs(value(row, column)));
    }
  }
  for (float& scale : out.scales) {
    if (scale == 0.0f) {
      scale = 1.0f;
      continue;
    }
    scale = std::max(scale / (format == DType::kE4M3 ? 448.0f : 57344.0f), std::ldexp(1.0f, -100));
    if (scale_format == ScaleFormat::kPow2) scale = std::exp2(std::ceil(std::log2(double{scale})));
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float given = value(row, column);
      const float scaled = given / out.scales[group_of(granularity, row, column, columns)];
      const bool e4m3 = format == DType::kE4M3;
      const uint8_t code = e4m3 ? tensor::encode_e4m3(scaled) : tensor::encode_e5m2(scaled);
      out.codes[row * columns + column] = code;
      ++counters.elements;
      counters.saturated += (code & 0x7F) == (e4m3 ? 0x7E : 0x7B);
      counters.underflowed += (code & 0x7F) == 0 && given != 0.0f;
      counters.not_a_number += std::isnan(given);
    }
  }
  return out;
}

TEST(Quantize, MatchesTheDefinitionOnEveryIsa) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1}, {3, 17}, {129, 257}, {5, 128}, {200, 31}};
  for (const cpu::Isa isa : test::cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    for (const auto& [rows, columns] : shapes) {
      for (const int variant : {0, 1, 2, 3}) {
        const DType format = variant & 1 ? DType::kE5M2 : DType::kE4M3;
        const ScaleFormat scale_format = variant & 2 ? ScaleFormat::kPow2 : ScaleFormat::kF32;
        for (const Granularity granularity : {Granularity::kTensor, Granularity::kRow,
                                              Granularity::kBlock, Granularity::kRowBlock}) {
          SCOPED_TRACE(fmt::format("{} [{}, {}] variant {} {}", backend->name(), rows, columns,
                                   variant, tensor::granularity_name(granularity)));
          // A slice of wider rows: what lies beside it must not be read.
          const int64_t stride = columns + 5;
          auto wide = hostile_values(rows * stride, 7);
          const TensorView x(wide.data(), DType::kF32, {rows, columns}, stride);
          std::vector<float> column_scale;
          if (variant == 3) {
            column_scale.resize(columns);
            for (int64_t i = 0; i < columns; ++i)
              column_scale[i] = 0.01f * static_cast<float>(i % 9);
          }
          ops::QuantizeCounters expected_counters;
          const Quantized expected =
              reference(x, granularity, format, scale_format, column_scale, expected_counters);
          const TensorView scale_view =
              column_scale.empty() ? TensorView()
                                   : TensorView(column_scale.data(), DType::kF32, {columns});
          const Quantized actual =
              quantize(*backend, x, granularity, format, scale_format, scale_view);
          ASSERT_EQ(std::memcmp(actual.scales.data(), expected.scales.data(),
                                expected.scales.size() * sizeof(float)),
                    0);
          ASSERT_EQ(actual.codes, expected.codes);
          const ops::QuantizeCounters counters = backend->take_quantize_counters();
          EXPECT_EQ(counters.elements, expected_counters.elements);
          EXPECT_EQ(counters.saturated, expected_counters.saturated);
          EXPECT_EQ(counters.underflowed, expected_counters.underflowed);
          EXPECT_EQ(counters.not_a_number, expected_counters.not_a_number);
        }
      }
    }
  }
}

// Every BF16 value, finite or not, through a scale of one: all roundings of the encoder.
TEST(Quantize, EncodesEveryBf16Value) {
  for (const cpu::Isa isa : test::cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      const float top = format == DType::kE4M3 ? 448.0f : 57344.0f;
      for (uint32_t first = 0; first < 0x10000; first += 128) {
        std::vector<uint16_t> x(129, tensor::encode_bf16(top));
        for (uint32_t i = 0; i < 128; ++i) {
          const float value = tensor::decode_bf16(static_cast<uint16_t>(first + i));
          // Finite values beyond the format would change the scale.
          if (!(std::isfinite(value) && std::fabs(value) > top)) {
            x[i] = static_cast<uint16_t>(first + i);
          }
        }
        const Quantized out = quantize(*backend, TensorView(x.data(), DType::kBF16, {1, 129}),
                                       Granularity::kRow, format, ScaleFormat::kF32);
        ASSERT_EQ(out.scales[0], 1.0f);
        for (uint32_t i = 0; i < 128; ++i) {
          const float value = tensor::decode_bf16(x[i]);
          ASSERT_EQ(out.codes[i], format == DType::kE4M3 ? tensor::encode_e4m3(value)
                                                         : tensor::encode_e5m2(value))
              << backend->name() << " " << value;
        }
      }
    }
  }
}

TEST(Quantize, CountersAreTakenOnce) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  std::vector<float> x = {1.0f, kNaN, 1e-30f, 0.0f, -1.0f};
  quantize(*backend, TensorView(x.data(), DType::kF32, {1, 5}), Granularity::kRow, DType::kE4M3,
           ScaleFormat::kF32);
  const ops::QuantizeCounters counters = backend->take_quantize_counters();
  EXPECT_EQ(counters.elements, 5);
  EXPECT_EQ(counters.saturated, 2);
  EXPECT_EQ(counters.underflowed, 1);
  EXPECT_EQ(counters.not_a_number, 1);
  EXPECT_EQ(backend->take_quantize_counters().elements, 0);
}

TEST(Quantize, NamesWhatIsWrong) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  std::vector<float> x(6);
  std::vector<uint8_t> codes(6);
  const ops::QuantizeArgs args{.x = TensorView(x.data(), DType::kF32, {2, 3}),
                               .column_scale = {},
                               .out = {TensorView(codes.data(), DType::kE4M3, {3, 2}),
                                       TensorView(x.data(), DType::kF32, {3}), Granularity::kRow}};
  try {
    backend->quantize(args);
    FAIL() << "a wrong shape was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("[quantize]"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("[3, 2]"), std::string::npos);
  }
}

TEST(Convert, RoundsToNearestEvenOnStridedRows) {
  for (const cpu::Isa isa : test::cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    const int64_t rows = 7;
    const int64_t columns = 37;
    auto wide = hostile_values(rows * 50, 11);
    std::vector<uint16_t> half(rows * 41, 0xABCD);
    backend->convert(TensorView(wide.data(), DType::kF32, {rows, columns}, 50),
                     TensorView(half.data(), DType::kBF16, {rows, columns}, 41));
    std::vector<float> back(rows * columns);
    backend->convert(TensorView(half.data(), DType::kBF16, {rows, columns}, 41),
                     TensorView(back.data(), DType::kF32, {rows, columns}));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < 41; ++column) {
        const uint16_t actual = half[row * 41 + column];
        const uint16_t expected =
            column < columns ? tensor::encode_bf16(wide[row * 50 + column]) : 0xABCD;
        ASSERT_EQ(actual, expected) << backend->name() << " " << row << ", " << column;
        if (column < columns) {
          ASSERT_EQ(std::bit_cast<uint32_t>(back[row * columns + column]),
                    uint32_t{expected} << 16);
        }
      }
    }
  }
}

}  // namespace
}  // namespace octet
