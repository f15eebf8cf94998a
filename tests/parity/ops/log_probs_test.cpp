// Log-probabilities, entropy and their gradients against float64.
#include <limits>

#include "base/error.h"
#include "parity/ops/op_test.h"

namespace octet::parity {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Row {
  double maximum = -INFINITY, log_sum = 0, entropy = 0;
  std::vector<double> log_p;
};

Row reference(const Array& logits, int64_t row, int64_t num_known, double temperature) {
  const int64_t columns = logits.view().shape[1];
  Row r;
  for (int64_t v = 0; v < num_known; ++v) {
    r.log_p.push_back(logits.get(row * columns + v) / temperature);
    r.maximum = std::max(r.maximum, r.log_p.back());
  }
  double sum = 0;
  for (const double z : r.log_p) sum += std::exp(z - r.maximum);
  r.log_sum = std::log(sum);
  for (double& z : r.log_p) {
    z = z - r.maximum - r.log_sum;
    if (std::exp(z) > 0) r.entropy -= std::exp(z) * z;
  }
  return r;
}

class LogProbsTest : public OpTest {
 protected:
  std::vector<double> log_probs(const Array& logits, const std::vector<int32_t>& targets,
                                float temperature, int64_t num_known) {
    const Array out = random_array(DType::kF32, Shape{static_cast<int64_t>(targets.size())}, 9);
    backend_->log_probs({.logits = logits,
                         .targets = Array(targets),
                         .log_probs = out,
                         .entropy = {},
                         .temperature = temperature,
                         .num_known = num_known});
    return out.values();
  }
};

TEST_P(LogProbsTest, EqualsFloat64) {
  for (const int64_t columns : {1, 2, 3, 15, 100, 4096, 9001}) {
    for (const float temperature : {1.0f, 0.7f, 3.0f}) {
      const int64_t known = columns > 10 ? columns - 5 : columns;
      constexpr int64_t kRows = 3;
      const Array logits = random_array(DType::kF32, Shape{kRows, columns}, 1, 4, 3);
      const std::vector<int32_t> targets = {0, static_cast<int32_t>(known - 1),
                                            static_cast<int32_t>(known / 2)};
      const Array out = random_array(DType::kF32, Shape{kRows}, 9);
      const Array entropy = random_array(DType::kF32, Shape{kRows}, 10);
      backend_->log_probs({.logits = logits,
                           .targets = Array(targets),
                           .log_probs = out,
                           .entropy = entropy,
                           .temperature = temperature,
                           .num_known = known});
      const std::vector<double> dlog_probs = {1.5, -0.3, 0}, dentropy = {0.2, 0, -2};
      const Array d1(DType::kF32, Shape{kRows}, dlog_probs);
      const Array d2(DType::kF32, Shape{kRows}, dentropy);
      std::vector<double> expected, expected_entropy, gradient;
      for (int64_t c = 0; c < kRows; ++c) {
        const auto row = static_cast<size_t>(c);
        const Row r = reference(logits, c, known, temperature);
        expected.push_back(r.log_p[static_cast<size_t>(targets[row])]);
        expected_entropy.push_back(r.entropy);
        for (int64_t v = 0; v < columns; ++v) {
          if (v >= known) {
            gradient.push_back(0);
            continue;
          }
          const double log_p = r.log_p[static_cast<size_t>(v)], p = std::exp(log_p);
          gradient.push_back((dlog_probs[row] * ((v == targets[row] ? 1 : 0) - p) -
                              dentropy[row] * p * (log_p + r.entropy)) /
                             double{temperature});
        }
      }
      const Tolerance bound = tolerance(Op::kLogProbs, DType::kF32);
      expect_near(out.values(), expected, bound, "log_probs");
      expect_near(entropy.values(), expected_entropy, bound, "entropy");
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const Array separate(dtype, Shape{kRows, columns}, 2);
        // F32 gradients in the logits' own memory.
        const Array& dlogits = dtype == DType::kF32 ? logits : separate;
        backend_->log_probs_backward({.logits = logits,
                                      .targets = Array(targets),
                                      .dlog_probs = d1,
                                      .dentropy = d2,
                                      .dlogits = dlogits,
                                      .temperature = temperature,
                                      .num_known = known});
        expect_near(dlogits.values(), gradient, tolerance(Op::kLogProbs, dtype), "dlogits");
      }
    }
  }
}

// log p and the entropy of one row by central differences.
TEST_P(LogProbsTest, GradientEqualsFiniteDifferences) {
  constexpr int64_t kColumns = 12;
  constexpr double kStep = 1e-2;
  const Array logits = random_array(DType::kF32, Shape{1, kColumns}, 1);
  const Array one(DType::kF32, Shape{1}, std::vector<double>{1}),
      two(DType::kF32, Shape{1}, std::vector<double>{2});
  const Array gradient(DType::kF32, Shape{1, kColumns});
  backend_->log_probs_backward({.logits = logits,
                                .targets = Array({4}),
                                .dlog_probs = one,
                                .dentropy = two,
                                .dlogits = gradient,
                                .temperature = 0.8f,
                                .num_known = kColumns});
  for (int64_t v = 0; v < kColumns; ++v) {
    double loss[2];
    for (const int side : {0, 1}) {
      Array moved(DType::kF32, Shape{1, kColumns}, logits.values());
      moved.set(v, logits.get(v) + (side == 1 ? kStep : -kStep));
      const Array log_prob(DType::kF32, Shape{1}), entropy(DType::kF32, Shape{1});
      backend_->log_probs({.logits = moved,
                           .targets = Array({4}),
                           .log_probs = log_prob,
                           .entropy = entropy,
                           .temperature = 0.8f,
                           .num_known = kColumns});
      loss[side] = log_prob.get(0) + 2 * entropy.get(0);
    }
    expect_near({(loss[1] - loss[0]) / (2 * kStep)}, {gradient.get(v)}, kFiniteDifference, "slope");
  }
}

TEST_P(LogProbsTest, ExtremeLogits) {
  const Array logits(DType::kF32, Shape{1, 4}, {50, -50, 1e4, -1e30});
  const Tolerance bound = tolerance(Op::kLogProbs, DType::kF32);
  const double expected[] = {50 - 1e4, -50 - 1e4, 0, -1e30};
  for (int32_t v = 0; v < 4; ++v) {
    expect_near(log_probs(logits, {v}, 1, 4), {expected[v]}, bound, "extreme");
  }
  // Masked ids have p = 0, log p = −∞, no gradient and no part in the entropy.
  const Array masked(DType::kF32, Shape{1, 3}, {-kInfinity, std::log(3.0), 0});
  expect_near(log_probs(masked, {0}, 1, 3), {-INFINITY}, bound, "masked");
  expect_near(log_probs(masked, {1}, 1, 3), {std::log(0.75)}, bound, "beside the masked");
  const Array entropy(DType::kF32, Shape{1});
  const Array gradient = random_array(DType::kF32, Shape{1, 3}, 9);
  const Array one(DType::kF32, Shape{1}, std::vector<double>{1});
  backend_->log_probs(
      {.logits = masked, .targets = {}, .log_probs = {}, .entropy = entropy, .num_known = 3});
  const double h = -0.75 * std::log(0.75) - 0.25 * std::log(0.25);
  expect_near(entropy.values(), {h}, bound, "entropy beside the masked");
  backend_->log_probs_backward({.logits = masked,
                                .targets = Array({1}),
                                .dlog_probs = one,
                                .dentropy = one,
                                .dlogits = gradient,
                                .num_known = 3});
  expect_near(gradient.values(),
              {0, 0.25 - 0.75 * (std::log(0.75) + h), -0.25 - 0.25 * (std::log(0.25) + h)}, bound,
              "gradient beside the masked");

  const Array nan(DType::kF32, Shape{1, 3}, {0, std::nan(""), 1});
  EXPECT_TRUE(std::isnan(log_probs(nan, {0}, 1, 3)[0]));
}

TEST_P(LogProbsTest, TargetsThatAreNotKnown) {
  const Array logits = random_array(DType::kF32, Shape{4, 6}, 1);
  const std::vector<double> actual = log_probs(logits, {-1, 4, 2, 900}, 1, 4);
  EXPECT_EQ(actual[0], 0);
  EXPECT_EQ(actual[1], -INFINITY);
  EXPECT_LT(actual[2], 0);
  EXPECT_EQ(actual[3], -INFINITY);
  const Array ones(DType::kF32, Shape{4}, {1, 1, 1, 1});
  const Array gradient = random_array(DType::kF32, Shape{4, 6}, 9);
  backend_->log_probs_backward({.logits = logits,
                                .targets = Array({-1, 4, 2, 900}),
                                .dlog_probs = ones,
                                .dentropy = {},
                                .dlogits = gradient,
                                .num_known = 4});
  for (int64_t v = 0; v < 6; ++v) EXPECT_EQ(gradient.get(v), 0) << "an ignored row";
  EXPECT_THROW(log_probs(logits, {0, 0, 0, 0}, 0, 4), Error);
  EXPECT_THROW(log_probs(logits, {0, 0, 0, 0}, 1, 7), Error);
  EXPECT_THROW(log_probs(logits, {0, 0, 0, 0}, 1, 0), Error);
  EXPECT_THROW(log_probs(logits, {0, 0, 0}, 1, 4), Error);
}

INSTANTIATE_TEST_SUITE_P(Isas, LogProbsTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
