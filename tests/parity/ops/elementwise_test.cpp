// Embedding, add, gated activations, norms and RoPE against float64, on each instruction set.
#include <limits>

#include "base/error.h"
#include "parity/ops/op_test.h"

namespace octet::parity {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
constexpr int64_t kTokens[] = {1, 7, 17, 129};
constexpr int64_t kWidths[] = {1, 2, 15, 16, 33, 64, 130};

class ElementwiseTest : public OpTest {};

TEST_P(ElementwiseTest, BF16RoundsToNearestEven) {
  // Ties, both neighbours of ties, overflow, subnormal, not-a-number: b = 0 leaves a to be rounded.
  const float values[] = {1.00390625f,
                          1.01171875f,
                          std::nextafter(1.00390625f, 2.0f),
                          std::nextafter(1.01171875f, 0.0f),
                          3.4e38f,
                          -3.39e38f,
                          1e-40f,
                          -1e-45f,
                          -0.0f,
                          std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0x7F800001u),
                          std::bit_cast<float>(0xFFFFFFFFu)};
  const int64_t count = std::size(values);
  // Through the embedding: table F32, out BF16, scale 1.
  Array table(DType::kF32, Shape{1, count});
  std::memcpy(table.view().data, values, sizeof(values));
  const Array out(DType::kBF16, Shape{1, count});
  backend_->embedding({.table = table, .ids = Array({0}), .out = out});
  for (int64_t i = 0; i < count; ++i) {
    // The product with 1 makes a NaN quiet, which leaves its BF16 code as it was.
    EXPECT_EQ(out.view().as<uint16_t>()[i], tensor::encode_bf16(values[i])) << i;
  }
}

TEST_P(ElementwiseTest, Embedding) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t width : kWidths) {
        // Rows of whole eights, apart and aligned; and others.
        const int64_t gap = width % 8 == 0 ? 8 : 3;
        const Array table = random_array(from, Shape{9, width}, 1, 1, gap);
        const Array ids({8, 0, 3, 3, 7}), out = random_array(to, Shape{5, width}, 3, 1, gap);
        backend_->embedding({.table = table, .ids = Array({4, 4, -1, 4, -1}), .out = out});
        for (int64_t i = 0; i < width; ++i) {
          EXPECT_EQ(out.get(2 * width + i), 0);
          EXPECT_EQ(out.get(4 * width + i), 0);
        }
        backend_->embedding({.table = table, .ids = ids, .out = out, .scale = 1.7f});
        std::vector<double> expected;
        for (int64_t t = 0; t < 5; ++t) {
          for (int64_t i = 0; i < width; ++i) {
            expected.push_back(table.get(static_cast<int64_t>(ids.get(t)) * width + i) *
                               double{1.7f});
          }
        }
        expect_near(out.values(), expected, tolerance(Op::kElementwise, to), "embedding");

        Array dtable = random_array(DType::kF32, Shape{9, width}, 2);
        std::vector<double> gradient = dtable.values();
        for (int64_t t = 0; t < 5; ++t) {
          for (int64_t i = 0; i < width; ++i) {
            gradient[static_cast<size_t>(static_cast<int64_t>(ids.get(t)) * width + i)] +=
                double{1.7f} * out.get(t * width + i);
          }
        }
        backend_->embedding_backward({.dout = out, .ids = ids, .dtable = dtable, .scale = 1.7f});
        expect_near(dtable.values(), gradient, {1e-6, 1e-6}, "embedding_backward");
      }
    }
  }
  const Array table(DType::kF32, Shape{9, 4}), out(DType::kF32, Shape{1, 4});
  EXPECT_THROW(backend_->embedding({.table = table, .ids = Array({9}), .out = out}), Error);
  EXPECT_THROW(backend_->embedding({.table = table, .ids = Array({-2}), .out = out}), Error);
  EXPECT_THROW(backend_->embedding({.table = table, .ids = Array({1, 2}), .out = out}), Error);
}

TEST_P(ElementwiseTest, Add) {
  for (const DType dtype : kDTypes) {
    for (const int64_t width : kWidths) {
      const Array a = random_array(dtype, Shape{7, width}, 1, 1, 5);
      const Array b = random_array(dtype, Shape{7, width}, 2);
      std::vector<double> expected = a.values();
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += b.get(static_cast<int64_t>(i));
      backend_->add({.a = a, .b = b, .out = a});
      expect_near(a.values(), expected, tolerance(Op::kElementwise, dtype), "add");
    }
  }
  const Array a(DType::kF32, Shape{2, 3}), b(DType::kF32, Shape{2, 4});
  const Array c(DType::kBF16, Shape{2, 3});
  EXPECT_THROW(backend_->add({.a = a, .b = b, .out = a}), Error);
  EXPECT_THROW(backend_->add({.a = a, .b = c, .out = a}), Error);
  EXPECT_THROW(backend_->add({.a = a, .b = {}, .out = a}), Error);
}

double activate(ops::Activation activation, double x) {
  if (activation == ops::Activation::kSilu) return x / (1 + std::exp(-x));
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double activate_slope(ops::Activation activation, double x) {
  if (activation == ops::Activation::kSilu) {
    const double s = 1 / (1 + std::exp(-x));
    return s + x * s * (1 - s);
  }
  const double root = std::sqrt(2 / M_PI);
  const double t = std::tanh(root * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

TEST_P(ElementwiseTest, GatedActivation) {
  for (const auto activation : {ops::Activation::kSilu, ops::Activation::kGeluTanh}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t tokens : kTokens) {
        const int64_t width = 33;
        Array gate_up = random_array(dtype, Shape{tokens, 2 * width}, 1, 3, 4);
        for (const auto& [at, value] : {std::pair(0, 100.0), {1, -100.0}, {2, 0.0}, {3, -8.0}}) {
          gate_up.set(at, value);
        }
        const Array dout = random_array(dtype, Shape{tokens, width}, 2, 1, 1);
        const Array out(dtype, Shape{tokens, width}, 7);
        std::vector<double> expected, gradient(static_cast<size_t>(tokens * 2 * width));
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t i = 0; i < width; ++i) {
            const double gate = gate_up.get(t * 2 * width + i);
            const double up = gate_up.get(t * 2 * width + width + i);
            const double dy = dout.get(t * width + i);
            expected.push_back(activate(activation, gate) * up);
            gradient[static_cast<size_t>(t * 2 * width + i)] =
                dy * up * activate_slope(activation, gate);
            gradient[static_cast<size_t>(t * 2 * width + width + i)] =
                dy * activate(activation, gate);
          }
        }
        backend_->gated_activation({.gate_up = gate_up, .out = out, .activation = activation});
        const Tolerance bound = tolerance(Op::kGatedActivation, dtype);
        expect_near(out.values(), expected, bound, "gated_activation");
        backend_->gated_activation_backward(
            {.dout = dout, .gate_up = gate_up, .dgate_up = gate_up, .activation = activation});
        expect_near(gate_up.values(), gradient, bound, "gated_activation_backward");
      }
    }
  }
}

TEST_P(ElementwiseTest, GatedActivationSlopeByFiniteDifferences) {
  for (const auto activation : {ops::Activation::kSilu, ops::Activation::kGeluTanh}) {
    constexpr int64_t kWidth = 9;
    constexpr double kStep = 1e-2;
    const Array gate_up = random_array(DType::kF32, Shape{1, 2 * kWidth}, 1);
    const Array ones(DType::kF32, Shape{1, kWidth}, std::vector<double>(kWidth, 1.0));
    const Array gradient(DType::kF32, Shape{1, 2 * kWidth});
    backend_->gated_activation_backward(
        {.dout = ones, .gate_up = gate_up, .dgate_up = gradient, .activation = activation});
    for (int64_t i = 0; i < 2 * kWidth; ++i) {
      double values[2];
      for (const int side : {0, 1}) {
        Array moved(DType::kF32, Shape{1, 2 * kWidth}, gate_up.values());
        moved.set(i, gate_up.get(i) + (side == 1 ? kStep : -kStep));
        const Array out(DType::kF32, Shape{1, kWidth});
        backend_->gated_activation({.gate_up = moved, .out = out, .activation = activation});
        values[side] = out.get(i % kWidth);
      }
      expect_near({(values[1] - values[0]) / (2 * kStep)}, {gradient.get(i)}, kFiniteDifference,
                  "slope");
    }
  }
}

// A row alone and among others, on one thread and two: the same bytes.
TEST_P(ElementwiseTest, RowsDependOnThemselvesAlone) {
  constexpr int64_t kRows = 200, kWidth = 300;
  const std::unique_ptr<ops::Backend> two_threads = make_backend(2);
  for (const DType dtype : kDTypes) {
    const Array x = random_array(dtype, Shape{kRows, 2 * kWidth}, 1);
    const Array weight = random_array(DType::kF32, Shape{2 * kWidth}, 2);
    const Array norm(dtype, Shape{kRows, 2 * kWidth}), gated(dtype, Shape{kRows, kWidth});
    two_threads->rms_norm({.x = x, .weight = weight, .y = norm});
    two_threads->gated_activation({.gate_up = x, .out = gated});
    for (const int64_t row : {0, 1, 133, 199}) {
      const Array one_norm(dtype, Shape{1, 2 * kWidth}), one_gated(dtype, Shape{1, kWidth});
      backend_->rms_norm({.x = x.view().slice_rows(row, 1), .weight = weight, .y = one_norm});
      backend_->gated_activation({.gate_up = x.view().slice_rows(row, 1), .out = one_gated});
      for (int64_t i = 0; i < 2 * kWidth; ++i) {
        ASSERT_EQ(one_norm.get(i), norm.get(row * 2 * kWidth + i));
      }
      for (int64_t i = 0; i < kWidth; ++i) ASSERT_EQ(one_gated.get(i), gated.get(row * kWidth + i));
    }
  }
}

TEST_P(ElementwiseTest, Rope) {
  constexpr int64_t kPositions = 30001, kHeads = 3;
  for (const int64_t width : {2, 16, 64, 80, 96, 128, 256}) {
    Array table(DType::kF32, Shape{kPositions, width});
    const int64_t half = width / 2;
    const std::vector<int32_t> positions = {0, 30000, 17, 1, 29999, 17, 4096};
    const auto tokens = static_cast<int64_t>(positions.size());
    for (const int32_t p : positions) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = p * std::pow(10000.0, -static_cast<double>(i) / half);
        table.set(p * width + i, std::cos(angle));
        table.set(p * width + half + i, std::sin(angle));
      }
    }
    for (const DType dtype : kDTypes) {
      const Array x = random_array(dtype, Shape{tokens, kHeads, width}, 3, 1, 2 * width);
      const Array y(dtype, Shape{tokens, kHeads, width});
      std::vector<double> expected(static_cast<size_t>(tokens * kHeads * width));
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t r = t * kHeads; r < (t + 1) * kHeads; ++r) {
          for (int64_t i = 0; i < half; ++i) {
            const double angle = positions[static_cast<size_t>(t)] *
                                 std::pow(10000.0, -static_cast<double>(i) / half);
            const double low = x.get(r * width + i), high = x.get(r * width + half + i);
            expected[static_cast<size_t>(r * width + i)] =
                low * std::cos(angle) - high * std::sin(angle);
            expected[static_cast<size_t>(r * width + half + i)] =
                high * std::cos(angle) + low * std::sin(angle);
          }
        }
      }
      const Array position_array(positions);
      const std::vector<double> start = x.values();
      backend_->rope({.x = x, .positions = position_array, .table = table, .y = y});
      expect_near(y.values(), expected, tolerance(Op::kRope, dtype), "rope");
      backend_->rope({.x = x, .positions = position_array, .table = table, .y = x});
      EXPECT_EQ(x.values(), y.values());
      backend_->rope(
          {.x = x, .positions = position_array, .table = table, .y = x, .inverse = true});
      if (dtype == DType::kF32) expect_near(x.values(), start, {1e-6, 1e-6}, "rope inverse");
    }
  }
  const Array x(DType::kF32, Shape{1, 2, 4}), table(DType::kF32, Shape{8, 4});
  EXPECT_THROW(backend_->rope({.x = x, .positions = Array({8}), .table = table, .y = x}), Error);
  EXPECT_THROW(backend_->rope({.x = x, .positions = Array({-1}), .table = table, .y = x}), Error);
}

INSTANTIATE_TEST_SUITE_P(Isas, ElementwiseTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
