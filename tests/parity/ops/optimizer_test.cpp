// AdamW and the squared norm against float64.
#include <limits>

#include "base/error.h"
#include "parity/ops/op_test.h"

namespace octet::parity {
namespace {

class OptimizerTest : public OpTest {};

TEST_P(OptimizerTest, AdamWFollowsFloat64) {
  for (const int64_t count : {1, 7, 33, 40000}) {
    ops::AdamWArgs args;
    args.learning_rate = 1e-2f;
    args.beta2 = 0.95f;
    args.eps = 1e-6f;
    args.weight_decay = 0.1f;
    args.gradient_scale = 0.5f;
    const Array w = random_array(DType::kF32, Shape{count}, 1);
    const Array m(DType::kF32, Shape{count}), v(DType::kF32, Shape{count});
    std::vector<double> ew = w.values(), em = m.values(), ev = v.values();
    for (args.step = 1; args.step <= 4; ++args.step) {
      const Array gradient =
          random_array(DType::kF32, Shape{count}, 10 + static_cast<uint32_t>(args.step));
      args.master = w;
      args.gradient = gradient;
      args.first_moment = m;
      args.second_moment = v;
      const double b1 = args.beta1, b2 = args.beta2, lr = args.learning_rate;
      for (size_t i = 0; i < ew.size(); ++i) {
        const double g = 0.5 * gradient.get(static_cast<int64_t>(i));
        ew[i] -= lr * double{args.weight_decay} * ew[i];
        em[i] = b1 * em[i] + (1 - b1) * g;
        ev[i] = b2 * ev[i] + (1 - b2) * g * g;
        ew[i] -= lr * (em[i] / (1 - std::pow(b1, args.step))) /
                 (std::sqrt(ev[i] / (1 - std::pow(b2, args.step))) + double{args.eps});
      }
      backend_->adamw(args);
    }
    expect_near(w.values(), ew, {1e-6, 1e-6}, "master");
    expect_near(m.values(), em, {1e-7, 1e-6}, "first moment");
    expect_near(v.values(), ev, {1e-7, 1e-6}, "second moment");
  }
}

// The first step has a closed form: w − lr (1 + … ) sign(g), whatever the gradient's size.
TEST_P(OptimizerTest, FirstStepIsTheSignOfTheGradient) {
  const Array w(DType::kF32, Shape{3}, {1, 1, 1}), g(DType::kF32, Shape{3}, {1e-3, -20, 0});
  const Array m(DType::kF32, Shape{3}), v(DType::kF32, Shape{3});
  backend_->adamw({.master = w,
                   .gradient = g,
                   .first_moment = m,
                   .second_moment = v,
                   .learning_rate = 0.125f,
                   .eps = 1e-12f});
  expect_near(w.values(), {0.875, 1.125, 1}, tolerance(Op::kAdamW, DType::kF32), "first step");
}

TEST_P(OptimizerTest, AdamWRefusesBadArguments) {
  const Array a(DType::kF32, Shape{4}), b(DType::kF32, Shape{5}), c(DType::kBF16, Shape{4});
  ops::AdamWArgs args{.master = a, .gradient = a, .first_moment = a, .second_moment = a};
  args.step = 0;
  EXPECT_THROW(backend_->adamw(args), Error);
  args.step = 1;
  args.gradient = b;
  EXPECT_THROW(backend_->adamw(args), Error);
  args.gradient = c;
  EXPECT_THROW(backend_->adamw(args), Error);
}

TEST_P(OptimizerTest, SquaredNorm) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t count : {1, 3, 17, 16384, 50001}) {
      Array x = random_array(dtype, Shape{count}, 1, 3);
      double expected = 0;
      for (const double value : x.values()) expected += value * value;
      const ops::SquaredNorm one = backend_->squared_norm(x);
      const ops::SquaredNorm two = make_backend(2)->squared_norm(x);
      EXPECT_NEAR(one.sum, expected, 1e-12 * expected);
      EXPECT_EQ(one.sum, two.sum);
      EXPECT_EQ(one.non_finite, 0);
      if (count < 17) continue;
      const double left_out = x.get(1) * x.get(1) + x.get(16) * x.get(16) + x.get(9) * x.get(9);
      x.set(1, std::nan(""));
      x.set(16, -std::numeric_limits<double>::infinity());
      x.set(9, std::numeric_limits<double>::infinity());
      const ops::SquaredNorm hostile = backend_->squared_norm(x);
      EXPECT_EQ(hostile.non_finite, 3);
      EXPECT_NEAR(hostile.sum, expected - left_out, 1e-12 * expected);
    }
  }
  // Squares that F32 cannot hold.
  const Array large(DType::kF32, Shape{2}, {3e38, 1e-30});
  EXPECT_NEAR(backend_->squared_norm(large).sum, 9e76, 1e70);
}

INSTANTIATE_TEST_SUITE_P(Isas, OptimizerTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
