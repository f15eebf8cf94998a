// Both gradients of a linear layer against float64 and against finite differences of the forward.
#include "parity/linear/linear_case.h"

namespace octet::test {
namespace {

// What linear_input_grad sees of one token's gradient for one weight: its values, or those of
// codes made here by the same quantiser (the contract in src/ops/linear.h).
class SeenGradient {
 public:
  SeenGradient(ops::Backend& backend, Matrix& dy, int64_t first, OwnedWeight& weight,
               DType gradient_format, bool dequantize)
      : dy_(dy), first_(first), weight_(weight), in_fp8_(weight.quantized && !dequantize) {
    if (!in_fp8_) return;
    const Granularity granularity = weight.codes.granularity;
    const TensorView slice = dy.view().slice_columns(first, weight.rows());
    codes_ = Codes();
    codes_.format = gradient_format;
    codes_.granularity =
        granularity == Granularity::kBlock ? Granularity::kRowBlock : Granularity::kRow;
    codes_.rows = dy.rows;
    codes_.columns = weight.rows();
    codes_.codes.resize(codes_.rows * codes_.columns);
    codes_.scales.resize(
        tensor::scale_shape(codes_.granularity, codes_.rows, codes_.columns).num_elements());
    ops::QuantizeArgs args{.x = slice, .column_scale = {}, .out = codes_.view()};
    if (granularity == Granularity::kRow) args.column_scale = weight.codes.view().scales;
    backend.quantize(args);
  }
  // dy[t, n] as the product sees it, times what is left of the weight's scale: so that
  // dx[t, k] = Σ_n value(t, n) × weight_value(n, k).
  double value(int64_t t, int64_t n) { return in_fp8_ ? codes_.at(t, n) : dy_.at(t, first_ + n); }
  double weight_value(int64_t n, int64_t k) {
    const double w = weight_.at(n, k);
    if (!weight_.quantized) return w;
    if (!in_fp8_) return tensor::round_bf16(static_cast<float>(w));
    return weight_.codes.granularity == Granularity::kRow ? w / weight_.codes.scales[n] : w;
  }

 private:
  Matrix& dy_;
  int64_t first_;
  OwnedWeight& weight_;
  bool in_fp8_;
  Codes codes_;
};

struct InputGradOptions {
  DType dtype = DType::kBF16;
  bool dequantize = false;
  bool accumulate = false;
  float alpha = 1.0f;
  DType gradient_format = DType::kE4M3;
};

void check_input_grad(ops::Backend& backend, WeightFormat format, int64_t tokens,
                      const std::vector<int64_t>& outputs, int64_t inputs,
                      const InputGradOptions& options) {
  SCOPED_TRACE(fmt::format("{} {} T={} N={} K={} dequantize={}", backend.name(),
                           format_name(format), tokens, fmt::join(outputs, "+"), inputs,
                           options.dequantize));
  std::mt19937 random(5);
  std::vector<OwnedWeight> owned;
  std::vector<ops::Weight> weights;
  int64_t total = 0;
  for (const int64_t n : outputs) {
    const DType dtype = format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
    owned.emplace_back(backend, format, normal_matrix(dtype, n, inputs, random, 0.1f));
    total += n;
  }
  for (OwnedWeight& weight : owned) weights.push_back(weight.weight());
  Matrix dy = normal_matrix(options.dtype, tokens, total, random, 1e-3f);
  for (int64_t n = 0; n < total; ++n) dy.set(tokens / 2, n, 0.0f);
  Matrix dx = normal_matrix(options.dtype, tokens, inputs, random, 1e-3f);
  Matrix before = dx;
  std::vector<SeenGradient> seen;
  int64_t first = 0;
  for (OwnedWeight& weight : owned) {
    seen.emplace_back(backend, dy, first, weight, options.gradient_format, options.dequantize);
    first += weight.rows();
  }
  backend.linear_input_grad({.dy = dy.view(),
                             .weights = weights,
                             .dx = dx.view(),
                             .alpha = options.alpha,
                             .accumulate = options.accumulate,
                             .dequantize = options.dequantize,
                             .gradient_format = options.gradient_format});
  std::vector<double> dy_values(tokens * total);
  std::vector<double> w_values(total * inputs);
  first = 0;
  for (size_t i = 0; i < owned.size(); first += owned[i++].rows()) {
    for (int64_t n = 0; n < owned[i].rows(); ++n) {
      for (int64_t t = 0; t < tokens; ++t) dy_values[t * total + first + n] = seen[i].value(t, n);
      for (int64_t k = 0; k < inputs; ++k) {
        w_values[(first + n) * inputs + k] = seen[i].weight_value(n, k);
      }
    }
  }
  expect_close(
      dx,
      [&](int64_t t, int64_t k) {
        Sum sum;
        for (int64_t n = 0; n < total; ++n) {
          sum.add(options.alpha * dy_values[t * total + n] * w_values[n * inputs + k]);
        }
        if (options.accumulate) sum.add(before.at(t, k));
        return std::pair(sum.value, sum.magnitude);
      },
      product_tolerance(options.dtype));
}

TEST(LinearInputGrad, MatchesFloat64) {
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      for (const int64_t tokens : {1, 7, 17, 129}) {
        check_input_grad(*backend, format, tokens, {129}, 257, {});
      }
      check_input_grad(*backend, format, 3, {1}, 1, {});
      check_input_grad(*backend, format, 11, {5, 260, 16}, 130,
                       {.dtype = DType::kF32, .accumulate = true, .alpha = -0.375f});
      check_input_grad(*backend, format, 11, {150, 16}, 70, {.gradient_format = DType::kE5M2});
      check_input_grad(*backend, format, 11, {150, 16}, 70, {.dequantize = true});
    }
  }
}

struct WeightGradOptions {
  bool quantize = false;
  DType dtype = DType::kBF16;
  DType gradient_format = DType::kE4M3;
  ScaleFormat scale_format = ScaleFormat::kF32;
  float alpha = 1.0f;
};

// The values of one operand quantised along tokens, straight from the definition.
std::vector<double> quantized_along_tokens(Matrix& x, const std::vector<int32_t>& offsets,
                                           DType format, ScaleFormat scale_format) {
  std::vector<double> values(x.rows * x.columns);
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    for (int64_t begin = offsets[s]; begin < offsets[s + 1]; begin += 128) {
      const int64_t end = std::min<int64_t>(begin + 128, offsets[s + 1]);
      for (int64_t c = 0; c < x.columns; ++c) {
        float amax = 0;
        for (int64_t t = begin; t < end; ++t) {
          amax = std::max(amax, std::fabs(tensor::round_bf16(x.at(t, c))));
        }
        float scale = amax == 0 ? 1.0f : amax / (format == DType::kE4M3 ? 448.0f : 57344.0f);
        if (scale_format == ScaleFormat::kPow2) scale = std::exp2(std::ceil(std::log2(scale)));
        for (int64_t t = begin; t < end; ++t) {
          const float scaled = tensor::round_bf16(x.at(t, c)) / scale;
          const float decoded = format == DType::kE4M3
                                    ? tensor::decode_e4m3(tensor::encode_e4m3(scaled))
                                    : tensor::decode_e5m2(tensor::encode_e5m2(scaled));
          values[t * x.columns + c] = static_cast<double>(decoded) * scale;
        }
      }
    }
  }
  return values;
}

void check_weight_grad(ops::Backend& backend, const std::vector<int32_t>& offsets, int64_t outputs,
                       int64_t inputs, const WeightGradOptions& options) {
  const int64_t tokens = offsets.back();
  SCOPED_TRACE(fmt::format("{} quantize={} T={} N={} K={}", backend.name(), options.quantize,
                           fmt::join(offsets, ","), outputs, inputs));
  std::mt19937 random(23);
  Matrix dy = normal_matrix(options.dtype, tokens, outputs, random, 1e-3f);
  Matrix x = normal_matrix(options.dtype, tokens, inputs, random);
  for (int64_t t = 0; t < tokens; ++t) x.set(t, inputs / 2, 0.0f);
  Matrix dw = normal_matrix(DType::kF32, outputs, inputs, random, 1e-2f);
  Matrix before = dw;
  std::vector<float> dbias(outputs, 0.25f);
  backend.linear_weight_grad({.dy = dy.view(),
                              .x = x.view(),
                              .dw = dw.view(),
                              .dbias = TensorView(dbias.data(), DType::kF32, {outputs}),
                              .alpha = options.alpha,
                              .sequence_offsets = offsets,
                              .quantize = options.quantize,
                              .gradient_format = options.gradient_format,
                              .scale_format = options.scale_format});
  std::vector<double> dy_values(tokens * outputs);
  std::vector<double> x_values(tokens * inputs);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t n = 0; n < outputs; ++n) dy_values[t * outputs + n] = dy.at(t, n);
    for (int64_t k = 0; k < inputs; ++k) x_values[t * inputs + k] = x.at(t, k);
  }
  for (int64_t n = 0; n < outputs; ++n) {
    Sum sum;
    sum.add(0.25);
    for (int64_t t = 0; t < tokens; ++t) sum.add(dy_values[t * outputs + n]);
    EXPECT_TRUE(within(dbias[n], sum.value, product_tolerance(DType::kF32), sum.magnitude));
  }
  if (options.quantize) {
    dy_values = quantized_along_tokens(dy, offsets, options.gradient_format, options.scale_format);
    x_values = quantized_along_tokens(x, offsets, DType::kE4M3, options.scale_format);
  }
  expect_close(
      dw,
      [&](int64_t n, int64_t k) {
        Sum sum;
        sum.add(before.at(n, k));
        for (int64_t t = 0; t < tokens; ++t) {
          sum.add(options.alpha * dy_values[t * outputs + n] * x_values[t * inputs + k]);
        }
        return std::pair(sum.value, sum.magnitude);
      },
      product_tolerance(DType::kF32));
}

TEST(LinearWeightGrad, MatchesFloat64) {
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
    for (const bool quantize : {false, true}) {
      for (const int32_t tokens : {1, 7, 17, 129}) {
        check_weight_grad(*backend, {0, tokens}, 129, 257, {.quantize = quantize});
      }
      check_weight_grad(*backend, {0, 1, 1, 140, 301}, 33, 70,
                        {.quantize = quantize, .dtype = DType::kF32, .alpha = 0.375f});
      check_weight_grad(*backend, {0, 130, 140}, 5, 9,
                        {.quantize = quantize,
                         .gradient_format = DType::kE5M2,
                         .scale_format = ScaleFormat::kPow2});
      check_weight_grad(*backend, {0, 3}, 1, 1, {.quantize = quantize});
    }
  }
}

// d/dx and d/dw of f = Σ y · g by central differences of the forward itself. f is bilinear, so the
// difference is exact up to rounding.
TEST(LinearGradients, AreTheDerivativesOfTheForward) {
  constexpr int64_t kTokens = 5;
  constexpr int64_t kOutputs = 7;
  constexpr int64_t kInputs = 11;
  constexpr float kStep = 0.5f;
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    std::mt19937 random(29);
    Matrix x = normal_matrix(DType::kF32, kTokens, kInputs, random);
    Matrix w = normal_matrix(DType::kF32, kOutputs, kInputs, random);
    Matrix g = normal_matrix(DType::kF32, kTokens, kOutputs, random);
    const ops::Weight weights[] = {{.dense = w.view(), .quantized = {}}};
    constexpr float kAlpha = 1.5f;
    const auto f = [&] {
      Matrix y(DType::kF32, kTokens, kOutputs);
      backend->linear({.x = x.view(),
                       .xq = {},
                       .weights = weights,
                       .bias = {},
                       .y = y.view(),
                       .alpha = kAlpha});
      double sum = 0;
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t n = 0; n < kOutputs; ++n) sum += double{y.at(t, n)} * g.at(t, n);
      }
      return sum;
    };
    const auto slope = [&](Matrix& of, int64_t r, int64_t c) {
      const float value = of.at(r, c);
      of.set(r, c, value + kStep);
      const double above = f();
      of.set(r, c, value - kStep);
      const double below = f();
      of.set(r, c, value);
      return (above - below) / (2 * kStep);
    };
    Matrix dx(DType::kF32, kTokens, kInputs);
    Matrix dw(DType::kF32, kOutputs, kInputs);
    backend->linear_input_grad(
        {.dy = g.view(), .weights = weights, .dx = dx.view(), .alpha = kAlpha});
    backend->linear_weight_grad({.dy = g.view(),
                                 .x = x.view(),
                                 .dw = dw.view(),
                                 .dbias = {},
                                 .alpha = kAlpha,
                                 .sequence_offsets = {}});
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < kInputs; ++k) EXPECT_NEAR(dx.at(t, k), slope(x, t, k), 1e-4);
    }
    for (int64_t n = 0; n < kOutputs; ++n) {
      for (int64_t k = 0; k < kInputs; ++k) EXPECT_NEAR(dw.at(n, k), slope(w, n, k), 1e-4);
    }
  }
}

// LoRA starts with B = 0: its gradients and quantised products are zeros and finite numbers.
TEST(LinearGradients, AZeroWeightGivesFiniteGradients) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  std::mt19937 random(31);
  for (const WeightFormat format : kWeightFormats) {
    const DType dtype = format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
    OwnedWeight b(*backend, format, Matrix(dtype, 40, 8));
    Matrix dy = normal_matrix(DType::kBF16, 6, 40, random);
    Matrix dx = normal_matrix(DType::kBF16, 6, 8, random);
    const ops::Weight weights[] = {b.weight()};
    backend->linear_input_grad({.dy = dy.view(), .weights = weights, .dx = dx.view()});
    for (int64_t t = 0; t < 6; ++t) {
      for (int64_t k = 0; k < 8; ++k) EXPECT_EQ(dx.at(t, k), 0.0f);
    }
  }
  for (const bool quantize : {false, true}) {
    Matrix dy = normal_matrix(DType::kBF16, 6, 40, random);
    Matrix zero(DType::kBF16, 6, 8);
    Matrix dw(DType::kF32, 40, 8);
    const std::vector<int32_t> offsets = {0, 6};
    backend->linear_weight_grad({.dy = dy.view(),
                                 .x = zero.view(),
                                 .dw = dw.view(),
                                 .dbias = {},
                                 .sequence_offsets = offsets,
                                 .quantize = quantize});
    for (int64_t n = 0; n < 40; ++n) {
      for (int64_t k = 0; k < 8; ++k) EXPECT_EQ(dw.at(n, k), 0.0f);
    }
  }
}

}  // namespace
}  // namespace octet::test
