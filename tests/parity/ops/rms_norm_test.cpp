// The norm and its gradients against float64 and finite differences.
#include "base/error.h"
#include "parity/ops/op_test.h"

namespace octet::parity {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};

struct Reference {
  std::vector<double> y, dx, dweight;
};

Reference reference(const Array& x, const Array& weight, const Array& dy, double eps,
                    double offset) {
  const auto width = static_cast<size_t>(weight.view().num_elements());
  const std::vector<double> xs = x.values(), dys = dy.values(), weights = weight.values();
  Reference r{std::vector<double>(xs.size()), std::vector<double>(xs.size()),
              std::vector<double>(width)};
  for (size_t row = 0; row < xs.size(); row += width) {
    double squares = 0, dot = 0;
    for (size_t i = 0; i < width; ++i) {
      squares += xs[row + i] * xs[row + i];
      dot += dys[row + i] * (weights[i] + offset) * xs[row + i];
    }
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (size_t i = 0; i < width; ++i) {
      const double w = weights[i] + offset;
      r.y[row + i] = xs[row + i] * inverse * w;
      r.dx[row + i] = inverse * w * dys[row + i] -
                      xs[row + i] * std::pow(inverse, 3) * dot / static_cast<double>(width);
      r.dweight[i] += dys[row + i] * xs[row + i] * inverse;
    }
  }
  return r;
}

class RmsNormTest : public OpTest {};

TEST_P(RmsNormTest, ForwardAndGradientsEqualFloat64) {
  for (const DType dtype : kDTypes) {
    for (const DType weight_dtype : kDTypes) {
      for (const int64_t tokens : {1, 7, 17, 129}) {
        for (const Shape& shape :
             {Shape{tokens, 2}, Shape{tokens, 63}, Shape{tokens, 200}, Shape{tokens, 3, 16},
              Shape{tokens, 2, 96}, Shape{tokens, 1, 256}}) {
          const int64_t width = shape[shape.rank() - 1];
          const float offset = tokens == 7 ? 1.0f : 0.0f;
          const Array x = random_array(dtype, shape, 1, 2, 11);
          const Array dy = random_array(dtype, shape, 2, 1, 5);
          const Array weight = random_array(weight_dtype, Shape{width}, 3);
          const Array y(dtype, shape, 4), dx(dtype, shape, 3);
          const Reference expected = reference(x, weight, dy, 1e-5f, offset);
          backend_->rms_norm(
              {.x = x, .weight = weight, .y = y, .eps = 1e-5f, .weight_offset = offset});
          const Tolerance bound = tolerance(Op::kRmsNorm, dtype);
          expect_near(y.values(), expected.y, bound, "y " + shape.to_string());

          const Array dweight = random_array(DType::kF32, Shape{width}, 4);
          std::vector<double> weight_sum = dweight.values();
          for (size_t i = 0; i < weight_sum.size(); ++i) weight_sum[i] += expected.dweight[i];
          ops::RmsNormBackwardArgs args{.dy = dy,
                                        .x = x,
                                        .weight = weight,
                                        .dx = dx,
                                        .dweight = dweight,
                                        .eps = 1e-5f,
                                        .weight_offset = offset};
          backend_->rms_norm_backward(args);
          expect_near(dx.values(), expected.dx, bound, "dx " + shape.to_string());
          expect_near(dweight.values(), weight_sum, {3e-5, 3e-5}, "dweight " + shape.to_string());

          // dx += …, in the place of dy; without dweight.
          std::vector<double> sum = dy.values();
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += expected.dx[i];
          args.dx = dy;
          args.dweight = {};
          args.accumulate = true;
          backend_->rms_norm_backward(args);
          expect_near(dy.values(), sum, bound, "accumulated dx " + shape.to_string());
        }
      }
    }
  }
}

TEST_P(RmsNormTest, GradientsEqualFiniteDifferences) {
  constexpr int64_t kWidth = 24;
  constexpr double kStep = 1e-2;
  const Shape shape{3, kWidth};
  const Array x = random_array(DType::kF32, shape, 1), dy = random_array(DType::kF32, shape, 2);
  const Array weight = random_array(DType::kF32, Shape{kWidth}, 3);
  const Array dx(DType::kF32, shape), dweight(DType::kF32, Shape{kWidth});
  backend_->rms_norm_backward({.dy = dy, .x = x, .weight = weight, .dx = dx, .dweight = dweight});
  const auto loss = [&](const Array& at, const Array& with) {
    const Array y(DType::kF32, shape);
    backend_->rms_norm({.x = at, .weight = with, .y = y});
    double sum = 0;
    for (int64_t i = 0; i < 3 * kWidth; ++i) sum += y.get(i) * dy.get(i);
    return sum;
  };
  for (int64_t i = 0; i < 3 * kWidth; ++i) {
    Array up(DType::kF32, shape, x.values()), down(DType::kF32, shape, x.values());
    up.set(i, x.get(i) + kStep);
    down.set(i, x.get(i) - kStep);
    expect_near({(loss(up, weight) - loss(down, weight)) / (2 * kStep)}, {dx.get(i)},
                kFiniteDifference, "dx");
  }
  for (int64_t i = 0; i < kWidth; ++i) {
    Array up(DType::kF32, Shape{kWidth}, weight.values());
    Array down(DType::kF32, Shape{kWidth}, weight.values());
    up.set(i, weight.get(i) + kStep);
    down.set(i, weight.get(i) - kStep);
    expect_near({(loss(x, up) - loss(x, down)) / (2 * kStep)}, {dweight.get(i)}, kFiniteDifference,
                "dweight");
  }
}

// Sums over rows do not depend on the threads.
TEST_P(RmsNormTest, WeightGradientIsTheSameOnTwoThreads) {
  const Shape shape{300, 2, 80};
  const Array x = random_array(DType::kBF16, shape, 1), dy = random_array(DType::kBF16, shape, 2);
  const Array weight = random_array(DType::kBF16, Shape{80}, 3), dx(DType::kBF16, shape);
  std::vector<double> results[2];
  for (const int threads : {1, 2}) {
    const Array dweight(DType::kF32, Shape{80});
    make_backend(threads)->rms_norm_backward(
        {.dy = dy, .x = x, .weight = weight, .dx = dx, .dweight = dweight});
    results[threads - 1] = dweight.values();
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_P(RmsNormTest, BadShapesAreRefused) {
  const Array x(DType::kF32, Shape{2, 8}), y(DType::kBF16, Shape{2, 8});
  const Array weight(DType::kF32, Shape{8}), narrow(DType::kF32, Shape{7});
  EXPECT_THROW(backend_->rms_norm({.x = x, .weight = narrow, .y = x}), Error);
  EXPECT_THROW(backend_->rms_norm({.x = x, .weight = weight, .y = y}), Error);
  EXPECT_THROW(backend_->rms_norm({.x = weight, .weight = weight, .y = weight}), Error);
}

INSTANTIATE_TEST_SUITE_P(Isas, RmsNormTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
