// A row's bytes depend on that row only: not on the batch it travels in, nor on the threads.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "parity/linear/linear_case.h"

namespace octet::test {
namespace {

// Rows [begin, begin + count) of codes, as codes of their own.
QuantizedView rows_of(const QuantizedView& q, int64_t begin, int64_t count) {
  return {q.codes.slice_rows(begin, count), q.scales.slice_rows(begin, count), q.granularity};
}

// `run` computes rows [begin, begin + count) of y on a backend. Compares the bytes of all rows at
// once on one thread with those of other cuts and of two threads.
template <class Run>
void expect_rows_alike(cpu::Isa isa, Matrix& y, const Run& run) {
  const auto one = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
  const auto two = cpu::make_cpu_backend({.num_threads = 2, .isa = isa});
  const Matrix blank = y;
  run(*one, y.view(), 0, y.rows);
  const std::vector<char> expected = y.bytes;
  for (ops::Backend* backend : {one.get(), two.get()}) {
    for (const int64_t batch : {1, 2, 3, 4, 16, 64, 129}) {
      y.bytes = blank.bytes;
      for (int64_t begin = 0; begin < y.rows; begin += batch) {
        const int64_t count = std::min(batch, y.rows - begin);
        run(*backend, y.view().slice_rows(begin, count), begin, count);
      }
      EXPECT_EQ(y.bytes, expected) << "in batches of " << batch;
    }
  }
}

TEST(LinearInvariance, ForwardRows) {
  constexpr int64_t kTokens = 131;
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      for (const int64_t inputs : {77, 1300}) {
        SCOPED_TRACE(fmt::format("{} {} K={}", backend->name(), format_name(format), inputs));
        std::mt19937 random(41);
        const DType dtype = format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
        OwnedWeight a(*backend, format, normal_matrix(dtype, 7, inputs, random));
        OwnedWeight b(*backend, format, normal_matrix(dtype, 50, inputs, random));
        const ops::Weight weights[] = {a.weight(), b.weight()};
        Matrix x = normal_matrix(DType::kBF16, kTokens, inputs, random);
        Codes xq(*backend, x.view(), activation_granularity(format));
        Matrix y = normal_matrix(DType::kBF16, kTokens, 57, random);
        expect_rows_alike(
            isa, y, [&](ops::Backend& runner, const TensorView& out, int64_t begin, int64_t count) {
              ops::LinearArgs args{
                  .x = {}, .xq = {}, .weights = weights, .bias = {}, .y = out, .accumulate = true};
              if (is_fp8(format)) {
                args.xq = rows_of(xq.view(), begin, count);
              } else {
                args.x = x.view().slice_rows(begin, count);
              }
              runner.linear(args);
            });
      }
    }
  }
}

// Few rows decode codes in registers, many rows through memory.
TEST(LinearInvariance, ForwardOfAllCodes) {
  constexpr int64_t kInputs = 300;
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      for (const Granularity granularity : {Granularity::kRow, Granularity::kBlock}) {
        SCOPED_TRACE(fmt::format("{} {} {}", backend->name(), tensor::dtype_name(format),
                                 tensor::granularity_name(granularity)));
        std::mt19937 random(59);
        Codes weight(*backend, normal_matrix(DType::kF32, 37, kInputs, random).view(), granularity,
                     format);
        for (int64_t i = 0; i < 256; ++i) {
          const bool finite = format == DType::kE4M3 ? (i & 0x7F) < 0x7F : (i & 0x7F) < 0x7C;
          weight.codes[i] = static_cast<uint8_t>(finite ? i : 0);
        }
        const ops::Weight weights[] = {{.dense = {}, .quantized = weight.view()}};
        Matrix x = normal_matrix(DType::kBF16, 131, kInputs, random);
        Codes xq(*backend, x.view(),
                 granularity == Granularity::kBlock ? Granularity::kRowBlock : Granularity::kRow);
        Matrix y = normal_matrix(DType::kF32, 131, 37, random);
        const auto forward = [&](ops::Backend& runner, const TensorView& out, int64_t begin,
                                 int64_t count) {
          runner.linear({.x = {},
                         .xq = rows_of(xq.view(), begin, count),
                         .weights = weights,
                         .bias = {},
                         .y = out});
        };
        expect_rows_alike(isa, y, forward);
        weight.codes[2 * kInputs + 5] = 0xFF;  // NaN in both formats
        for (const int64_t count : {1, 131}) {
          forward(*backend, y.view().slice_rows(0, count), 0, count);
          for (int64_t n = 0; n < 37; ++n) EXPECT_EQ(std::isnan(y.at(0, n)), n == 2);
        }
      }
    }
  }
}

TEST(LinearInvariance, InputGradRows) {
  constexpr int64_t kTokens = 131;
  for (const cpu::Isa isa : cpu_isas()) {
    const auto backend = cpu::make_cpu_backend({.num_threads = 1, .isa = isa});
    for (const WeightFormat format : kWeightFormats) {
      SCOPED_TRACE(backend->name() + " " + format_name(format));
      std::mt19937 random(43);
      const DType dtype = format == WeightFormat::kBf16 ? DType::kBF16 : DType::kF32;
      OwnedWeight a(*backend, format, normal_matrix(dtype, 200, 150, random));
      OwnedWeight b(*backend, format, normal_matrix(dtype, 30, 150, random));
      const ops::Weight weights[] = {a.weight(), b.weight()};
      Matrix dy = normal_matrix(DType::kBF16, kTokens, 230, random);
      Matrix dx = normal_matrix(DType::kBF16, kTokens, 150, random);
      expect_rows_alike(
          isa, dx, [&](ops::Backend& runner, const TensorView& out, int64_t begin, int64_t count) {
            runner.linear_input_grad({.dy = dy.view().slice_rows(begin, count),
                                      .weights = weights,
                                      .dx = out,
                                      .accumulate = true});
          });
    }
  }
}

TEST(LinearInvariance, WeightGradThreads) {
  for (const cpu::Isa isa : cpu_isas()) {
    for (const bool quantize : {false, true}) {
      std::mt19937 random(47);
      Matrix dy = normal_matrix(DType::kBF16, 300, 230, random);
      Matrix x = normal_matrix(DType::kBF16, 300, 150, random);
      const std::vector<int32_t> offsets = {0, 140, 300};
      std::vector<char> bytes[3];
      for (const int threads : {1, 2}) {
        const auto backend = cpu::make_cpu_backend({.num_threads = threads, .isa = isa});
        Matrix dw(DType::kF32, 230, 150);
        backend->linear_weight_grad({.dy = dy.view(),
                                     .x = x.view(),
                                     .dw = dw.view(),
                                     .dbias = {},
                                     .sequence_offsets = offsets,
                                     .quantize = quantize});
        bytes[threads] = dw.bytes;
      }
      EXPECT_EQ(bytes[1], bytes[2]);
    }
  }
}

// One group of a quantised weight gradient never reads the tokens of another sequence.
TEST(LinearInvariance, SequencesKeepTheirScales) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  std::mt19937 random(53);
  Matrix dy = normal_matrix(DType::kBF16, 20, 40, random);
  Matrix x = normal_matrix(DType::kBF16, 20, 24, random);
  for (int64_t t = 10; t < 20; ++t) {
    for (int64_t k = 0; k < 24; ++k) x.set(t, k, 1000.0f * x.at(t, k));
    for (int64_t n = 0; n < 40; ++n) dy.set(t, n, 0.0f);  // the second sequence adds nothing
  }
  const auto gradient = [&](int64_t tokens, const std::vector<int32_t>& offsets) {
    Matrix dw(DType::kF32, 40, 24);
    backend->linear_weight_grad({.dy = dy.view().slice_rows(0, tokens),
                                 .x = x.view().slice_rows(0, tokens),
                                 .dw = dw.view(),
                                 .dbias = {},
                                 .sequence_offsets = offsets,
                                 .quantize = true});
    return dw.bytes;
  };
  EXPECT_EQ(gradient(20, {0, 10, 20}), gradient(10, {0, 10}));
  EXPECT_NE(gradient(20, {0, 20}), gradient(10, {0, 10}));
}

TEST(LinearErrors, NameTheOpAndTheShapes) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  Matrix x(DType::kBF16, 3, 8);
  Matrix w(DType::kBF16, 5, 9);
  Matrix y(DType::kBF16, 3, 5);
  const ops::Weight weights[] = {{.dense = w.view(), .quantized = {}}};
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(
      message([&] {
        backend->linear({.x = x.view(), .xq = {}, .weights = weights, .bias = {}, .y = y.view()});
      }).find("[linear] a weight must be F32 or BF16 [5, 8]"),
      std::string::npos);
  EXPECT_NE(message([&] {
              backend->linear_input_grad({.dy = y.view(), .weights = weights, .dx = x.view()});
            }).find("[linear_input_grad] a weight"),
            std::string::npos);
  Matrix dw(DType::kF32, 5, 8);
  const std::vector<int32_t> offsets = {0, 2};
  EXPECT_NE(message([&] {
              backend->linear_weight_grad({.dy = y.view(),
                                           .x = x.view(),
                                           .dw = dw.view(),
                                           .dbias = {},
                                           .sequence_offsets = offsets,
                                           .quantize = true});
            }).find("[linear_weight_grad] sequence_offsets"),
            std::string::npos);
  Matrix square(DType::kBF16, 5, 8);
  OwnedWeight blocks(*backend, WeightFormat::kBlock, square);
  Codes xq(*backend, x.view(), Granularity::kRow);
  const ops::Weight quantized[] = {blocks.weight()};
  EXPECT_NE(message([&] {
              backend->linear(
                  {.x = {}, .xq = xq.view(), .weights = quantized, .bias = {}, .y = y.view()});
            }).find("needs xq of granularity row_block"),
            std::string::npos);
}

}  // namespace
}  // namespace octet::test
