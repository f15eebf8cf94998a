#include "rl/calibrated_clipping.h"

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet::rl {
namespace {

struct Tokens {
  std::vector<double> reference, fp8, advantage, weight;
  void add(double r_reference, double r_fp8, double a, double w = 1) {
    reference.push_back(r_reference);
    fp8.push_back(r_fp8);
    advantage.push_back(a);
    weight.push_back(w);
  }
  CalibrationTokens view() const { return {reference, fp8, advantage, weight}; }
};

// n negative tokens whose log-ratios are spread evenly over (−s, s): the share at or below
// 1 − ε is (log(1 − ε) + s)/2s, and FP8, k times as wide, has L = (1 − ε)^k as that quantile.
Tokens uniform(int n, double spread, double widening) {
  Tokens tokens;
  for (int i = 0; i < n; ++i) {
    const double x = spread * (2 * (i + 0.5) / n - 1);
    tokens.add(std::exp(x), std::exp(widening * x), -1);
    tokens.add(std::exp(x), std::exp(widening * x), 1);
  }
  return tokens;
}

TEST(CalibratedClipping, QuantileOfAUniformIsKnown) {
  const double spread = 0.3;
  const double widening = 1.5;
  const int n = 20000;
  const Tokens tokens = uniform(n, spread, widening);
  CalibrationConfig config;
  const CalibrationTarget exact = exact_target(config, tokens.view());
  EXPECT_NEAR(exact.alpha, (std::log(0.8) + spread) / (2 * spread), 1.0 / n);
  const double low = std::pow(0.8, widening);
  EXPECT_NEAR(std::log(*exact.low), std::log(low), 2 * widening * spread / n);
  ClipCalibrator calibrator(config);
  calibrator.add(tokens.view());
  EXPECT_NEAR(std::log(*calibrator.target().low), std::log(low), LogRatioHistogram::kBinWidth);
}

// Σ_{A>0} r A·1{r<H} over log r spread evenly on (−s, s) is (H − e^−s)·n/2s, and that of A<0 is
// (e^s − L)·n/2s; so the balance is (H − e^−s)/(e^s − L).
TEST(CalibratedClipping, BalanceOfAUniformIsKnown) {
  const double spread = 0.5;
  const Tokens tokens = uniform(200000, spread, 1);
  const auto rho = [&](double low, double high) {
    return (high - std::exp(-spread)) / (std::exp(spread) - low);
  };
  for (const ClipBounds bounds : {ClipBounds{0.8, 1.24}, ClipBounds{0.7, 1.5}}) {
    EXPECT_NEAR(balance(tokens.reference, tokens.advantage, tokens.weight, bounds),
                rho(bounds.low, bounds.high), 1e-4);
  }
  // Twice as wide: L* = 0.64, and H* solves (H − e^−2s)/(e^2s − L*) = ρ_reference.
  const Tokens wide = uniform(200000, spread, 2);
  CalibrationConfig config;
  config.high_range.most = 4.0;
  const double low = 0.64;
  const double high = rho(0.8, 1.24) * (std::exp(1.0) - low) + std::exp(-1.0);
  ASSERT_LT(high, 4.0);
  const CalibrationTarget exact = exact_target(config, wide.view());
  EXPECT_NEAR(*exact.low, low, 1e-4);
  EXPECT_NEAR(*exact.high, high, 0.01 + 1e-3);  // the nearest point of the grid
  ClipCalibrator calibrator(config);
  calibrator.add(wide.view());
  EXPECT_NEAR(*calibrator.target().high, *exact.high, 0.02 + 1e-9);
}

TEST(CalibratedClipping, WeightsActOnTheBalanceOnly) {
  Tokens tokens = uniform(2000, 0.4, 1.3);
  const CalibrationTarget plain = exact_target({}, tokens.view());
  for (size_t t = 0; t < tokens.weight.size(); ++t) {
    if (tokens.advantage[t] > 0) tokens.weight[t] = 3;
  }
  const CalibrationTarget weighted = exact_target({}, tokens.view());
  EXPECT_EQ(weighted.alpha, plain.alpha);
  EXPECT_EQ(weighted.low, plain.low);
  EXPECT_NEAR(weighted.rho_reference, 3 * plain.rho_reference, 1e-9);
}

// Equal ratios at the quantile, a ratio on the bound, and a flat balance.
TEST(CalibratedClipping, Ties) {
  CalibrationConfig config;
  config.min_tail = 2;
  Tokens tokens;
  for (const double r : {0.8, 0.8, 0.9, 1.0}) tokens.add(r, 0.7, -1);
  tokens.add(1.0, 1.0, 1);
  const CalibrationTarget target = exact_target(config, tokens.view());
  EXPECT_EQ(target.tail, 2);  // r ≤ 1 − ε counts the bound
  EXPECT_EQ(target.alpha, 0.5);
  EXPECT_EQ(target.low, 0.7);
  EXPECT_FALSE(target.high);  // nothing above L*: the balance has no value

  tokens.fp8[3] = 1.0;
  EXPECT_EQ(exact_target(config, tokens.view()).high, 1.2);  // all of the grid alike: the smallest
  ClipCalibrator calibrator(config);
  calibrator.add(tokens.view());
  EXPECT_EQ(calibrator.target().high, 1.2);
}

TEST(CalibratedClipping, TargetsStayInTheirRanges) {
  CalibrationConfig config;
  config.min_tail = 10;
  Tokens tokens = uniform(200, 0.25, 4);  // (1 − ε)^4 = 0.41
  EXPECT_EQ(exact_target(config, tokens.view()).low, 0.5);
  ClipCalibrator calibrator(config);
  calibrator.add(tokens.view());
  EXPECT_EQ(calibrator.target().low, 0.5);
  for (double& ratio : tokens.fp8) ratio = std::max(ratio, 0.95);
  EXPECT_EQ(exact_target(config, tokens.view()).low, 0.9);
  EXPECT_LE(*exact_target(config, tokens.view()).high, 2.0);
}

TEST(CalibratedClipping, Damping) {
  EXPECT_DOUBLE_EQ(damped(0.6, 0.64, 0.05), 0.62);  // half the way
  EXPECT_DOUBLE_EQ(damped(0.6, 0.9, 0.05), 0.65);   // at most δ
  EXPECT_DOUBLE_EQ(damped(1.8, 1.2, 0.10), 1.7);
  EXPECT_DOUBLE_EQ(damped(0.7, 0.7, 0.05), 0.7);
}

TEST(CalibratedClipping, Grid) {
  const std::vector<double> grid = high_grid({});
  ASSERT_EQ(grid.size(), 41u);
  EXPECT_EQ(grid[0], 1.2);
  EXPECT_EQ(grid[2], 1.24);
  EXPECT_EQ(grid[40], 2.0);
}

TEST(CalibratedClipping, PoolsUntilTheTailIsLongEnough) {
  CalibrationConfig config;
  config.min_tail = 30;
  ClipCalibrator calibrator(config);
  Tokens tokens;
  for (int i = 0; i < 20; ++i) {
    tokens.add(0.7, 0.65, -1);
    tokens.add(1.0, 1.0, -1);
    tokens.add(1.1, 1.1, 1);
  }
  calibrator.add(tokens.view());
  EXPECT_FALSE(calibrator.calibrate().low);
  EXPECT_EQ(calibrator.bounds().low, 0.6);
  EXPECT_EQ(calibrator.bounds().high, 1.8);
  EXPECT_EQ(calibrator.tail(), 20);
  calibrator.add(tokens.view());
  const CalibrationTarget target = calibrator.calibrate();
  EXPECT_EQ(target.tail, 40);
  EXPECT_NEAR(calibrator.bounds().low, 0.6 + (0.65 - 0.6) / 2, 0.001);
  EXPECT_DOUBLE_EQ(calibrator.bounds().high, 1.7);
  EXPECT_EQ(calibrator.tail(), 0);
  EXPECT_EQ(calibrator.pool().num_negative, 0);
}

TEST(CalibratedClipping, NonFiniteTokensAreDroppedAndCounted) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Tokens tokens;
  tokens.add(nan, 1, -1);
  tokens.add(1, infinity, -1);
  tokens.add(1, 0, -1);
  tokens.add(1, 1, nan);
  tokens.add(1, 1, 1, nan);
  tokens.add(1, 1, -1);
  ClipCalibrator calibrator({});
  calibrator.add(tokens.view());
  EXPECT_EQ(calibrator.pool().num_dropped, 5);
  EXPECT_EQ(calibrator.pool().num_negative, 1);
}

TEST(CalibratedClipping, StateRoundTripsByteForByte) {
  CalibrationConfig config;
  config.min_tail = 10;
  ClipCalibrator calibrator(config);
  const Tokens tokens = uniform(500, 0.37, 1.7);
  calibrator.add(tokens.view());
  calibrator.calibrate();
  calibrator.add(uniform(77, 0.41, 1.1).view());
  const std::string text = calibrator.state().dump();
  ClipCalibrator restored(config);
  restored.restore(parse_json(text, "state"));
  EXPECT_EQ(restored.state().dump(), text);
  calibrator.add(tokens.view());
  restored.add(tokens.view());
  calibrator.calibrate();
  restored.calibrate();
  EXPECT_EQ(restored.state().dump(), calibrator.state().dump());
  EXPECT_EQ(restored.bounds().low, calibrator.bounds().low);
}

TEST(CalibratedClipping, BadStatesAreRefusedAndChangeNothing) {
  ClipCalibrator calibrator({});
  calibrator.add(uniform(50, 0.3, 1).view());
  const Json good = calibrator.state();
  const auto refused = [&](const char* key, Json value) {
    Json bad = good;
    bad[key] = std::move(value);
    EXPECT_THROW(calibrator.restore(bad), Error) << key;
    EXPECT_EQ(calibrator.state(), good);
  };
  refused("low", "0.6");
  refused("tail", -1);
  refused("num_negative", 51);
  refused("fp8_negative", Json::array({Json::array({4096, 1, 0.0})}));
  refused("fp8_negative", Json::array({Json::array({0, -1, 0.0})}));
  refused("fp8_positive_mass", Json::array({1.0}));
  EXPECT_THROW(calibrator.restore(Json()), Error);
}

TEST(CalibratedClipping, BadConfigurationsAreRefused) {
  const auto refused = [](auto change) {
    CalibrationConfig config;
    change(config);
    EXPECT_THROW(ClipCalibrator{config}, UsageError);
  };
  refused([](CalibrationConfig& c) { c.interval = 0; });
  refused([](CalibrationConfig& c) { c.min_tail = 0; });
  refused([](CalibrationConfig& c) { c.init = {1.8, 0.6}; });
  refused([](CalibrationConfig& c) { c.high_step = 0; });
  refused([](CalibrationConfig& c) { c.high_step = 1e-9; });
}

TEST(CalibratedClipping, Metrics) {
  ClipCalibrator calibrator({});
  // Nothing measured yet: only the bounds and an empty tail.
  EXPECT_EQ(
      calibration_metrics(calibrator.bounds(), calibrator.target()),
      (MetricList{{"calibration/low", 0.6}, {"calibration/high", 1.8}, {"calibration/tail", 0}}));
  EXPECT_TRUE(calibrator.is_due(0));
  EXPECT_FALSE(calibrator.is_due(19));
  EXPECT_TRUE(calibrator.is_due(20));
}

}  // namespace
}  // namespace octet::rl
