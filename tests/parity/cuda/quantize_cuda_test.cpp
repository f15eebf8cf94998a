// The quantiser and its inverse: bytes equal to the oracle's, hostile values included.
#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

using tensor::Granularity;
using tensor::QuantizedView;
using tensor::ScaleFormat;

struct Quantized {
  Array codes, scales;
  QuantizedView view(Granularity granularity) const {
    return {codes.view(), scales.view(), granularity};
  }
};
Quantized room(DType format, Granularity granularity, int64_t rows, int64_t columns) {
  return {Array(format, Shape{rows, columns}),
          Array(DType::kF32, tensor::scale_shape(granularity, rows, columns))};
}

class QuantizeCuda : public CudaTest {};

TEST_F(QuantizeCuda, CodesScalesAndCountersEqualTheOracles) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 17}, {7, 128}, {130, 129}, {129, 264}, {17, 1000}, {5, 4096}}) {
    for (const Granularity granularity :
         {Granularity::kTensor, Granularity::kRow, Granularity::kBlock, Granularity::kRowBlock}) {
      for (const DType format : {DType::kE4M3, DType::kE5M2}) {
        for (const DType dtype : {DType::kBF16, DType::kF32}) {
          for (const ScaleFormat scale_format : {ScaleFormat::kF32, ScaleFormat::kPow2}) {
            for (const bool scaled : {false, true}) {
              const Array x(dtype, Shape{rows, columns},
                            hostile_values(rows * columns, static_cast<uint32_t>(rows)), 8);
              const Array factors = random_array(DType::kF32, Shape{columns}, 5);
              const Quantized a = room(format, granularity, rows, columns);
              const Quantized b = room(format, granularity, rows, columns);
              for (const auto& [backend, to] :
                   {std::pair<ops::Backend*, const Quantized*>{&cpu(), &a}, {&gpu(), &b}}) {
                backend->take_quantize_counters();
                backend->quantize({.x = x,
                                   .column_scale = scaled ? factors.view() : TensorView(),
                                   .out = to->view(granularity),
                                   .scale_format = scale_format});
              }
              const std::string what = fmt::format(
                  "[{}, {}] {} {} from {} pow2 {} scaled {}", rows, columns,
                  tensor::granularity_name(granularity), tensor::dtype_name(format),
                  tensor::dtype_name(dtype), scale_format == ScaleFormat::kPow2, scaled);
              ASSERT_TRUE(a.scales.bytes() == b.scales.bytes()) << what;
              ASSERT_TRUE(a.codes.bytes() == b.codes.bytes()) << what;
              const ops::QuantizeCounters m = cpu().take_quantize_counters();
              const ops::QuantizeCounters n = gpu().take_quantize_counters();
              EXPECT_EQ(m.elements, n.elements) << what;
              EXPECT_EQ(m.saturated, n.saturated) << what;
              EXPECT_EQ(m.underflowed, n.underflowed) << what;
              EXPECT_EQ(m.not_a_number, n.not_a_number) << what;
            }
          }
        }
      }
    }
  }
}

TEST_F(QuantizeCuda, AllCodesDecodeAlike) {
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    Array codes(format, Shape{2, 256}), scales(DType::kF32, Shape{2});
    for (int i = 0; i < 512; ++i) codes.view().as<uint8_t>()[i] = static_cast<uint8_t>(i);
    scales.set(0, 1.0);
    scales.set(1, 0.37);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Array a(dtype, Shape{2, 256}), b(dtype, Shape{2, 256});
      cpu().dequantize({.x = {codes, scales, Granularity::kRow}, .out = a});
      gpu().dequantize({.x = {codes, scales, Granularity::kRow}, .out = b});
      expect_same(b, a, {0, 0}, std::string(tensor::dtype_name(format)));
    }
  }
}

TEST_F(QuantizeCuda, BlocksDequantizeAlike) {
  const Array x(DType::kBF16, Shape{130, 300}, normal_values(130 * 300, 4));
  for (const Granularity granularity :
       {Granularity::kTensor, Granularity::kBlock, Granularity::kRowBlock}) {
    const Quantized q = room(DType::kE4M3, granularity, 130, 300);
    cpu().quantize({.x = x, .column_scale = {}, .out = q.view(granularity)});
    const Array a(DType::kBF16, Shape{130, 300}), b(DType::kBF16, Shape{130, 300});
    cpu().dequantize({.x = q.view(granularity), .out = a});
    gpu().dequantize({.x = q.view(granularity), .out = b});
    EXPECT_TRUE(a.bytes() == b.bytes());
  }
}

// Every E4M3 and E5M2 midpoint and its neighbours: rounding and saturation.
TEST_F(QuantizeCuda, EncodesEveryNeighbourhoodAlike) {
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    std::vector<double> values;
    for (int code = 0; code < 0x7C; ++code) {
      const auto decode = [&](int c) {
        return format == DType::kE4M3 ? tensor::decode_e4m3(static_cast<uint8_t>(c))
                                      : tensor::decode_e5m2(static_cast<uint8_t>(c));
      };
      const float middle = 0.5f * (decode(code) + decode(code + 1));
      if (!std::isfinite(middle)) continue;
      for (const float v :
           {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f), -middle}) {
        values.push_back(v);
      }
    }
    // The largest fixes the scale at 1; the column scale carries what BF16 cannot.
    const double largest = format == DType::kE4M3 ? 448 : 57344;
    values.push_back(largest);
    const auto count = static_cast<int64_t>(values.size());
    const Array ones(DType::kBF16, Shape{1, count}, std::vector<double>(values.size(), 1.0));
    const Array factors(DType::kF32, Shape{count}, values);
    const Quantized a = room(format, Granularity::kRow, 1, count);
    const Quantized b = room(format, Granularity::kRow, 1, count);
    cpu().quantize({.x = ones, .column_scale = factors, .out = a.view(Granularity::kRow)});
    gpu().quantize({.x = ones, .column_scale = factors, .out = b.view(Granularity::kRow)});
    EXPECT_EQ(a.scales.get(0), 1.0);
    EXPECT_TRUE(a.codes.bytes() == b.codes.bytes());
  }
}

}  // namespace
}  // namespace octet::parity
