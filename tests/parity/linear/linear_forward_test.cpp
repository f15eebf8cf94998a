// The forward product against float64, on every instruction set.
#include "parity/linear/linear_case.h"

namespace octet::test {
namespace {

struct Options {
  DType x = DType::kBF16;
  DType y = DType::kBF16;
  bool bias = false;
  bool accumulate = false;
  float alpha = 1.0f;
};

void check_forward(ops::Backend& backend, WeightFormat format, int64_t tokens,
                   const std::vector<int64_t>& outputs, int64_t inputs, const Options& options) {
  SCOPED_TRACE(fmt::format("{} {} T={} N={} K={}", backend.name(), format_name(format), tokens,
                           fmt::join(outputs, "+"), inputs));
  std::mt19937 random(17);
  Matrix x = normal_matrix(options.x, tokens, inputs, random);
  for (int64_t k = 0; k < inputs; ++k) x.set(tokens / 2, k, 0.0f);  // a zero row
  Codes xq(backend, x.view(), activation_granularity(format));
  std::vector<OwnedWeight> owned;
  std::vector<ops::Weight> weights;
  int64_t total = 0;
  for (const int64_t n : outputs) {
    const DType dtype = format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
    owned.emplace_back(backend, format, normal_matrix(dtype, n, inputs, random, 0.1f));
    total += n;
  }
  for (OwnedWeight& weight : owned) weights.push_back(weight.weight());
  Matrix bias = normal_matrix(options.y, 1, total, random);
  Matrix y = normal_matrix(options.y, tokens, total, random);
  Matrix before = y;
  ops::LinearArgs args{.x = is_fp8(format) ? TensorView() : x.view(),
                       .xq = is_fp8(format) ? xq.view() : QuantizedView(),
                       .weights = weights,
                       .bias = {},
                       .y = y.view(),
                       .alpha = options.alpha,
                       .accumulate = options.accumulate};
  if (options.bias) args.bias = TensorView(bias.view().data, options.y, {total});
  backend.linear(args);
  const std::vector<double> x_values =
      is_fp8(format) ? decoded(xq, tokens, inputs) : decoded(x, tokens, inputs);
  std::vector<double> w_values;
  for (OwnedWeight& weight : owned) {
    const std::vector<double> values = decoded(weight, weight.rows(), inputs);
    w_values.insert(w_values.end(), values.begin(), values.end());
  }
  expect_close(
      y,
      [&](int64_t t, int64_t column) {
        Sum sum;
        for (int64_t k = 0; k < inputs; ++k) {
          sum.add(options.alpha * x_values[t * inputs + k] * w_values[column * inputs + k]);
        }
        if (options.bias) sum.add(bias.at(0, column));
        if (options.accumulate) sum.add(before.at(t, column));
        return std::pair(sum.value, sum.magnitude);
      },
      product_tolerance(options.y));
}

TEST(Linear, MatchesFloat64) {
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      for (const int64_t tokens : {1, 7, 17, 129}) {
        check_forward(*backend, format, tokens, {129}, 257, {});
        check_forward(*backend, format, tokens, {5, 130, 16}, 128, {.y = DType::kF32});
      }
      check_forward(*backend, format, 3, {1}, 1, {.bias = true});
      check_forward(*backend, format, 9, {40, 8}, 1400,
                    {.x = DType::kF32, .bias = true, .accumulate = true, .alpha = -0.375f});
      check_forward(*backend, format, 100, {33}, 2049, {.accumulate = true});
    }
  }
}

// One weight is not zero, so one column of y is: a block's scale and place are right.
TEST(Linear, FindsASingleNonZeroWeight) {
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      for (const auto& [n, k] : {std::pair(0, 0), std::pair(127, 128), std::pair(200, 77),
                                 std::pair(255, 255), std::pair(128, 127)}) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}]", backend->name(), format_name(format), n, k));
        Matrix values(format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32, 256, 256);
        values.set(n, k, 448.0f);
        OwnedWeight owned(*backend, format, values);
        Matrix x(DType::kBF16, 2, 256);
        x.set(0, k, 448.0f);
        x.set(1, k, 28.0f);  // its scale is a power of two
        Codes xq(*backend, x.view(), activation_granularity(format));
        Matrix y(DType::kF32, 2, 256);
        const ops::Weight weights[] = {owned.weight()};
        backend->linear({.x = x.view(),
                         .xq = is_fp8(format) ? xq.view() : QuantizedView(),
                         .weights = weights,
                         .bias = {},
                         .y = y.view()});
        for (int64_t column = 0; column < 256; ++column) {
          EXPECT_EQ(y.at(0, column), column == n ? 448.0f * 448.0f : 0.0f);
          EXPECT_EQ(y.at(1, column), column == n ? 448.0f * 28.0f : 0.0f);
        }
      }
    }
  }
}

// A sum of many equal positive terms loses nothing that F32 need not lose.
TEST(Linear, LongSumsStayExactEnough) {
  constexpr int64_t kInputs = 16384;
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      SCOPED_TRACE(backend->name() + " " + format_name(format));
      Matrix values(format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32, 4, kInputs);
      Matrix x(DType::kBF16, 1, kInputs);
      for (int64_t k = 0; k < kInputs; ++k) {
        x.set(0, k, 0.8125f);
        for (int64_t n = 0; n < 4; ++n) values.set(n, k, 1.1015625f);
      }
      OwnedWeight owned(*backend, format, values);
      Codes xq(*backend, x.view(), activation_granularity(format));
      const double w = owned.at(0, 0);
      const double expected = kInputs * w * (is_fp8(format) ? xq.at(0, 0) : x.at(0, 0));
      Matrix y(DType::kF32, 1, 4);
      const ops::Weight weights[] = {owned.weight()};
      backend->linear({.x = x.view(),
                       .xq = is_fp8(format) ? xq.view() : QuantizedView(),
                       .weights = weights,
                       .bias = {},
                       .y = y.view()});
      for (int64_t n = 0; n < 4; ++n) EXPECT_NEAR(y.at(0, n) / expected, 1.0, 1e-5);
    }
  }
}

// q, k and v share an input, not scales: a large k does not coarsen a small q.
TEST(Linear, AGroupKeepsScalesApart) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 2});
  for (const WeightFormat format :
       {WeightFormat::kTensor, WeightFormat::kChannel, WeightFormat::kBlock}) {
    std::mt19937 random(3);
    OwnedWeight q(*backend, format, normal_matrix(DType::kF32, 72, 200, random, 1.0f));
    OwnedWeight k(*backend, format, normal_matrix(DType::kF32, 24, 200, random, 1000.0f));
    Matrix x = normal_matrix(DType::kBF16, 5, 200, random);
    Codes xq(*backend, x.view(), activation_granularity(format));
    Matrix together(DType::kF32, 5, 96);
    Matrix alone(DType::kF32, 5, 72);
    const ops::Weight both[] = {q.weight(), k.weight()};
    const ops::Weight only_q[] = {q.weight()};
    backend->linear({.x = {}, .xq = xq.view(), .weights = both, .bias = {}, .y = together.view()});
    backend->linear({.x = {}, .xq = xq.view(), .weights = only_q, .bias = {}, .y = alone.view()});
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t n = 0; n < 72; ++n) ASSERT_EQ(together.at(t, n), alone.at(t, n));
    }
  }
}

// The product with an identity gives the value of each code, bit for bit.
TEST(Linear, DecodesEveryCode) {
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      Codes weight;  // [256, 1]: code n in row n
      weight.format = format;
      weight.granularity = Granularity::kTensor;
      weight.rows = 256;
      weight.columns = 1;
      weight.scales = {1.0f};
      for (int code = 0; code < 256; ++code) weight.codes.push_back(static_cast<uint8_t>(code));
      Matrix x(DType::kF32, 1, 1);
      x.set(0, 0, 1.0f);
      Codes xq(*backend, x.view(), Granularity::kRow);
      xq.codes = {0x38};  // 1
      xq.scales = {1.0f};
      Matrix y(DType::kF32, 1, 256);
      const ops::Weight weights[] = {{.dense = {}, .quantized = weight.view()}};
      backend->linear({.x = {}, .xq = xq.view(), .weights = weights, .bias = {}, .y = y.view()});
      for (int code = 0; code < 256; ++code) {
        const float expected =
            format == DType::kE4M3 ? tensor::decode_e4m3(code) : tensor::decode_e5m2(code);
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(y.at(0, code))) << code;
        } else {
          EXPECT_EQ(y.at(0, code), expected) << backend->name() << " code " << code;
        }
      }
    }
  }
}

}  // namespace
}  // namespace octet::test
