// Codes and scales, byte for byte, against numbers made outside of Octet.
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "support/cpu_isas.h"
#include "support/golden_file.h"
#include "tensor/codec.h"

namespace octet {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::ScaleFormat;
using tensor::TensorView;

const auto& golden() {
  static const auto tensors =
      test::read_golden_file(OCTET_SOURCE_DIR "/tests/golden/data/fp8/quantise.safetensors");
  return tensors;
}

void expect_golden(ops::Backend& backend, const std::string& input, const std::string& name,
                   Granularity granularity, ScaleFormat format) {
  SCOPED_TRACE(backend.name() + " " + input + "." + name);
  const test::GoldenTensor& x = golden().at(input + ".x");
  const int64_t rows = x.shape[0];
  const int64_t columns = x.shape[1];
  auto values = x.as<uint16_t>();
  std::vector<uint8_t> codes(values.size());
  const tensor::Shape scale_shape = tensor::scale_shape(granularity, rows, columns);
  std::vector<float> scales(scale_shape.num_elements());
  backend.quantize({.x = TensorView(values.data(), DType::kBF16, {rows, columns}),
                    .column_scale = {},
                    .out = {TensorView(codes.data(), DType::kE4M3, {rows, columns}),
                            TensorView(scales.data(), DType::kF32, scale_shape), granularity},
                    .scale_format = format});
  EXPECT_EQ(codes, golden().at(input + "." + name + ".codes").as<uint8_t>());
  EXPECT_EQ(scales, golden().at(input + "." + name + ".scales").as<float>());
}

TEST(QuantizeGolden, EveryGranularity) {
  const std::pair<const char*, Granularity> kinds[] = {{"tensor", Granularity::kTensor},
                                                       {"channel", Granularity::kRow},
                                                       {"block", Granularity::kBlock},
                                                       {"token", Granularity::kRow},
                                                       {"token128", Granularity::kRowBlock}};
  for (const cpu::Isa isa : test::cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    for (const char* input : {"a", "b", "c"}) {
      for (const auto& [name, granularity] : kinds) {
        expect_golden(*backend, input, name, granularity, ScaleFormat::kF32);
        expect_golden(*backend, input, std::string(name) + ".pow2", granularity,
                      ScaleFormat::kPow2);
      }
    }
    expect_golden(*backend, "inf", "token", Granularity::kRow, ScaleFormat::kF32);
  }
}

TEST(QuantizeGolden, DecodeTables) {
  std::vector<uint8_t> codes(256);
  for (int code = 0; code < 256; ++code) codes[code] = static_cast<uint8_t>(code);
  for (const auto& [name, dtype] :
       {std::pair("decode", DType::kE4M3), std::pair("decode_e5m2", DType::kE5M2)}) {
    const auto expected = golden().at(name).as<float>();
    for (const cpu::Isa isa : test::cpu_isas()) {
      const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
      std::vector<float> scale = {1.0f};
      std::vector<float> values(256);
      backend->dequantize({.x = {TensorView(codes.data(), dtype, {1, 256}),
                                 TensorView(scale.data(), DType::kF32, {1}), Granularity::kTensor},
                           .out = TensorView(values.data(), DType::kF32, {1, 256})});
      for (int code = 0; code < 256; ++code) {
        SCOPED_TRACE(backend->name() + " code " + std::to_string(code));
        const float scalar =
            dtype == DType::kE4M3 ? tensor::decode_e4m3(code) : tensor::decode_e5m2(code);
        if (std::isnan(expected[code])) {
          EXPECT_TRUE(std::isnan(values[code]) && std::isnan(scalar));
        } else {
          EXPECT_EQ(std::bit_cast<uint32_t>(values[code]), std::bit_cast<uint32_t>(expected[code]));
          EXPECT_EQ(std::bit_cast<uint32_t>(scalar), std::bit_cast<uint32_t>(expected[code]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace octet
