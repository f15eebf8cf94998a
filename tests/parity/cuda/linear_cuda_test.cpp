// The products against the oracle, and a row's independence of everything but itself.
#include <algorithm>

#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

using tensor::Granularity;
using tensor::QuantizedView;

enum class Format { kBf16, kTensor, kChannel, kBlock };
constexpr Format kFormats[] = {Format::kBf16, Format::kTensor, Format::kChannel, Format::kBlock};
constexpr const char* kNames[] = {"bf16", "tensor", "channel", "block"};

// |actual − expected| ≤ a rounding + this × Σ |terms|: the matrix units keep fewer bits of a sum
// of 8-bit products.
double accumulation(Format format) { return format == Format::kBf16 ? 3e-5 : 1e-3; }

struct Operand {
  Array dense, codes, scales;
  Granularity granularity = Granularity::kRow;
  QuantizedView view() const { return {codes.view(), scales.view(), granularity}; }
};

Operand make_operand(ops::Backend& cpu, Format format, bool is_weight, int64_t rows,
                     int64_t columns, uint32_t seed, double scale) {
  Operand x;
  x.dense = random_array(DType::kBF16, Shape{rows, columns}, seed, scale);
  if (format == Format::kBf16) return x;
  if (format == Format::kBlock) {
    x.granularity = is_weight ? Granularity::kBlock : Granularity::kRowBlock;
  } else if (format == Format::kTensor && is_weight) {
    x.granularity = Granularity::kTensor;
  }
  x.codes = Array(DType::kE4M3, Shape{rows, columns});
  x.scales = Array(DType::kF32, tensor::scale_shape(x.granularity, rows, columns));
  cpu.quantize({.x = x.dense, .column_scale = {}, .out = x.view()});
  return x;
}

// The operand's values without their signs: the product of two is Σ |terms|.
Operand magnitudes(const Operand& x) {
  Operand m;
  m.granularity = x.granularity;
  m.dense = Array(x.dense.view().dtype, x.dense.view().shape);
  for (int64_t i = 0; i < m.dense.view().num_elements(); ++i)
    m.dense.set(i, std::fabs(x.dense.get(i)));
  if (x.codes.view().empty()) return m;
  m.codes = Array(x.codes.view().dtype, x.codes.view().shape);
  for (int64_t i = 0; i < m.codes.view().num_elements(); ++i) {
    m.codes.view().as<uint8_t>()[i] = x.codes.view().as<uint8_t>()[i] & 0x7F;
  }
  m.scales = Array(DType::kF32, x.scales.view().shape, x.scales.values());
  return m;
}

ops::Weight weight_of(const Operand& x) {
  ops::Weight weight;
  if (x.codes.view().empty()) {
    weight.dense = x.dense.view();
  } else {
    weight.quantized = x.view();
  }
  return weight;
}

ops::LinearArgs args_of(const Operand& x, std::span<const ops::Weight> weights, const Array& y) {
  ops::LinearArgs args;
  if (x.codes.view().empty()) {
    args.x = x.dense.view();
  } else {
    args.xq = x.view();
  }
  args.weights = weights;
  args.y = y.view();
  return args;
}

void expect_within(const Array& actual, const Array& expected, const Array& terms, double rounding,
                   double accumulation, const std::string& what) {
  for (int64_t i = 0; i < actual.view().num_elements(); ++i) {
    const double bound =
        rounding * std::fabs(expected.get(i)) + accumulation * terms.get(i) + 1e-30;
    ASSERT_LE(std::fabs(actual.get(i) - expected.get(i)), bound)
        << what << ": element " << i << " is " << actual.get(i) << ", expected " << expected.get(i);
  }
}

class LinearCuda : public CudaTest {
 protected:
  void check_forward(Format format, int64_t tokens, const std::vector<int64_t>& outputs,
                     int64_t inputs, DType y_dtype, bool extras) {
    const std::string what =
        fmt::format("{} T={} N={} K={} extras {}", kNames[static_cast<int>(format)], tokens,
                    fmt::join(outputs, "+"), inputs, extras);
    const Operand x = make_operand(cpu(), format, false, tokens, inputs, 1, 1);
    std::vector<Operand> owned, owned_magnitudes;
    std::vector<ops::Weight> weights, weight_magnitudes;
    int64_t total = 0;
    for (const int64_t n : outputs) {
      owned.push_back(
          make_operand(cpu(), format, true, n, inputs, static_cast<uint32_t>(100 + total), 0.1));
      total += n;
    }
    for (const Operand& w : owned) owned_magnitudes.push_back(magnitudes(w));
    for (size_t i = 0; i < owned.size(); ++i) {
      weights.push_back(weight_of(owned[i]));
      weight_magnitudes.push_back(weight_of(owned_magnitudes[i]));
    }
    const Array bias = random_array(y_dtype, Shape{total}, 9);
    const Array start = random_array(y_dtype, Shape{tokens, total}, 10, 1, 3);
    const Array a = copy(start), b = copy(start);
    const Array terms(DType::kF32, Shape{tokens, total});
    for (const auto& [backend, y] :
         {std::pair<ops::Backend*, const Array*>{&cpu(), &a}, {&gpu(), &b}}) {
      ops::LinearArgs args = args_of(x, weights, *y);
      if (extras) {
        args.bias = bias.view();
        args.alpha = 0.75f;
        args.accumulate = true;
      }
      backend->linear(args);
    }
    const Operand x_magnitudes = magnitudes(x);
    cpu().linear(args_of(x_magnitudes, weight_magnitudes, terms));
    expect_within(b, a, terms, y_dtype == DType::kBF16 ? 0x1p-7 : 1e-6, accumulation(format), what);
  }
};

// With the kernels of the device's own architecture, and with those that every one has.
class EveryLinearCuda : public LinearCuda, public ::testing::WithParamInterface<bool> {
 protected:
  ops::Backend& gpu() override { return GetParam() ? portable_gpu() : LinearCuda::gpu(); }
};
INSTANTIATE_TEST_SUITE_P(Kernels, EveryLinearCuda, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "portable" : "own"; });

TEST_P(EveryLinearCuda, ForwardEqualsTheOracle) {
  for (const Format format : kFormats) {
    for (const int64_t tokens : {1, 7, 17, 33, 129, 300}) {
      check_forward(format, tokens, {96}, 256, DType::kBF16, false);
      check_forward(format, tokens, {40, 24, 130}, 320, DType::kBF16, true);
    }
    check_forward(format, 5, {8}, 4096, DType::kF32, true);
    check_forward(format, 3, {1, 200}, 77, DType::kBF16, true);  // rows that are not aligned
    check_forward(format, 9, {65}, 1, DType::kF32, false);
    check_forward(format, 257, {384}, 1024, DType::kBF16, false);
  }
}

// Bytes of a row among T others, at every place of a tile, alone, and in each kernel's range.
TEST_P(EveryLinearCuda, ARowsBytesDependOnTheRowAlone) {
  constexpr int64_t kRows = 700, kInputs = 1088, kOutputs = 200;
  for (const Format format : kFormats) {
    const Operand x = make_operand(cpu(), format, false, kRows, kInputs, 1, 1);
    const Operand w = make_operand(cpu(), format, true, kOutputs, kInputs, 2, 0.1);
    const ops::Weight weight = weight_of(w);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Array whole(dtype, Shape{kRows, kOutputs});
      gpu().linear(args_of(x, {&weight, 1}, whole));
      for (const int64_t count : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 100, 256, 257, 511}) {
        for (const int64_t first : {0, 3, 129, 189}) {
          const Array part(dtype, Shape{count, kOutputs});
          ops::LinearArgs args = args_of(x, {&weight, 1}, part);
          if (format == Format::kBf16) {
            args.x = x.dense.view().slice_rows(first, count);
          } else {
            args.xq.codes = x.codes.view().slice_rows(first, count);
            args.xq.scales = x.scales.view().slice_rows(first, count);
          }
          gpu().linear(args);
          const auto row_bytes = static_cast<size_t>(kOutputs * tensor::dtype_bytes(dtype));
          ASSERT_EQ(std::memcmp(part.bytes().data(),
                                whole.bytes().data() + static_cast<size_t>(first) * row_bytes,
                                static_cast<size_t>(count) * row_bytes),
                    0)
              << kNames[static_cast<int>(format)] << " rows " << first << " + " << count;
        }
      }
    }
  }
}

// Adapters of a group: in one call, what they give one by one, and what the oracle says.
TEST_F(LinearCuda, EachWeightMayReadItsOwnColumns) {
  for (const int64_t rank : {32, 5, 1032}) {
    for (const int64_t tokens : {1, 17, 200}) {
      const std::vector<int64_t> outputs = {96, 40, 200};
      const Array x = random_array(DType::kBF16, Shape{tokens, 3 * rank}, 1);
      const Array start = random_array(DType::kBF16, Shape{tokens, 336}, 2);
      std::vector<Operand> owned;
      for (const int64_t n : outputs) {
        owned.push_back(make_operand(cpu(), Format::kBf16, true, n, rank, 3, 0.1));
      }
      std::vector<ops::Weight> weights;
      for (const Operand& w : owned) weights.push_back(weight_of(w));
      ops::LinearArgs args{.x = x, .xq = {}, .weights = weights, .bias = {}, .y = {}};
      args.alpha = 2;
      args.accumulate = args.x_per_weight = true;
      const Array a = copy(start), b = copy(start), singly = copy(start);
      args.y = a;
      cpu().linear(args);
      args.y = b;
      gpu().linear(args);
      args.y = singly;
      for_each_weight(args, [&](const ops::LinearArgs& part) { gpu().linear(part); });
      expect_same(b, a, {1e-3, 0x1p-7}, fmt::format("rank {} T={}", rank, tokens));
      EXPECT_EQ(std::memcmp(b.bytes().data(), singly.bytes().data(), b.bytes().size()), 0)
          << "rank " << rank << " T=" << tokens;
    }
  }
}

// A chain of BF16 products has the same bytes on every kind of matrix unit. Sums of 8-bit products
// on Hopper have not, which also shows that both kernels ran.
TEST_F(LinearCuda, BothKernelsGiveTheSameBf16Bytes) {
  if (gpu().name().find("sm_90a") == std::string::npos) GTEST_SKIP() << "no Hopper GPU";
  for (const Format format : kFormats) {
    for (const int64_t tokens : {1, 16, 100, 300}) {
      const Operand x = make_operand(cpu(), format, false, tokens, 1104, 1, 1);
      const Operand w = make_operand(cpu(), format, true, 136, 1104, 2, 0.1);
      const ops::Weight weight = weight_of(w);
      const Array own(DType::kF32, Shape{tokens, 136}), portable(DType::kF32, Shape{tokens, 136});
      gpu().linear(args_of(x, {&weight, 1}, own));
      portable_gpu().linear(args_of(x, {&weight, 1}, portable));
      EXPECT_EQ(std::ranges::equal(own.bytes(), portable.bytes()), format == Format::kBf16)
          << kNames[static_cast<int>(format)] << " " << tokens << " tokens";
    }
  }
}

TEST_P(EveryLinearCuda, InputGradientEqualsTheOracle) {
  for (const Format format : kFormats) {
    for (const int64_t tokens : {1, 17, 130}) {
      for (const bool dequantize : {false, true}) {
        for (const DType gradient_format : {DType::kE4M3, DType::kE5M2}) {
          const std::vector<int64_t> outputs = {136, 40};
          std::vector<Operand> owned;
          std::vector<ops::Weight> weights;
          for (const int64_t n : outputs) {
            owned.push_back(make_operand(cpu(), format, true, n, 200, 3, 0.1));
          }
          for (const Operand& w : owned) weights.push_back(weight_of(w));
          const Array dy = random_array(DType::kBF16, Shape{tokens, 176}, 4);
          const Array start = random_array(DType::kBF16, Shape{tokens, 200}, 5);
          const Array a = copy(start), b = copy(start);
          for (const auto& [backend, dx] :
               {std::pair<ops::Backend*, const Array*>{&cpu(), &a}, {&gpu(), &b}}) {
            backend->linear_input_grad({.dy = dy,
                                        .weights = weights,
                                        .dx = *dx,
                                        .alpha = 0.5f,
                                        .accumulate = true,
                                        .dequantize = dequantize,
                                        .gradient_format = gradient_format});
          }
          // Σ |terms| of 176 products of deviation 0.1 is about 11.
          expect_same(b, a, {11 * accumulation(format), 0x1p-7},
                      fmt::format("{} T={} dequantize {}", kNames[static_cast<int>(format)], tokens,
                                  dequantize));
        }
      }
    }
  }
}

TEST_P(EveryLinearCuda, WeightGradientEqualsTheOracle) {
  for (const bool quantize : {false, true}) {
    for (const DType gradient_format : {DType::kE4M3, DType::kE5M2}) {
      for (const auto& offsets :
           std::vector<std::vector<int32_t>>{{0, 1}, {0, 17, 150, 151}, {0, 400}}) {
        const int64_t tokens = offsets.back();
        const Array dy = random_array(DType::kBF16, Shape{tokens, 70}, 6);
        const Array x = random_array(DType::kBF16, Shape{tokens, 136}, 7);
        const Array start = random_array(DType::kF32, Shape{70, 136}, 8);
        const Array bias = random_array(DType::kF32, Shape{70}, 8);
        const Array a = copy(start), b = copy(start), bias_a = copy(bias), bias_b = copy(bias);
        cpu().linear_weight_grad({.dy = dy,
                                  .x = x,
                                  .dw = a,
                                  .dbias = bias_a,
                                  .alpha = 0.5f,
                                  .sequence_offsets = offsets,
                                  .quantize = quantize,
                                  .gradient_format = gradient_format});
        gpu().linear_weight_grad({.dy = dy,
                                  .x = x,
                                  .dw = b,
                                  .dbias = bias_b,
                                  .alpha = 0.5f,
                                  .sequence_offsets = offsets,
                                  .quantize = quantize,
                                  .gradient_format = gradient_format});
        const double terms = 0.4 * static_cast<double>(tokens);
        expect_same(b, a, {terms * (quantize ? 1e-3 : 3e-5), 1e-5}, "dw");
        expect_same(bias_b, bias_a, {1e-4, 1e-5}, "dbias");
      }
    }
  }
}

}  // namespace
}  // namespace octet::parity
