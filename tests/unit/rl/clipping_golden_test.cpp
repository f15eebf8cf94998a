// Calibrated Clipping against the expected values of the made distributions.
#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "rl/calibrated_clipping.h"

namespace octet::rl {
namespace {

struct Case {
  std::string name;
  CalibrationConfig config;
  std::vector<double> ratio_reference, ratio_fp8, advantage, weight;
  Json expected;

  CalibrationTokens tokens(size_t begin, size_t end) const {
    const auto part = [&](const std::vector<double>& values) {
      return std::span(values).subspan(begin, end - begin);
    };
    return {part(ratio_reference), part(ratio_fp8), part(advantage), part(weight)};
  }
  CalibrationTokens tokens() const { return tokens(0, advantage.size()); }
};

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Json& c : read_json_file(OCTET_SOURCE_DIR "/tests/golden/data/clipping/cases.json")) {
    const auto values = [&](const char* name) { return c.at(name).get<std::vector<double>>(); };
    Case made{c.at("name"),
              {},
              values("ratio_reference"),
              values("ratio_fp8"),
              values("advantage"),
              values("weight"),
              c.at("expected")};
    made.config.reference = {c.at("reference_bounds").at(0), c.at("reference_bounds").at(1)};
    list.push_back(std::move(made));
  }
  return list;
}

TEST(ClippingGolden, ExactTargetsAndPaths) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const CalibrationTarget target = exact_target(c.config, c.tokens());
    EXPECT_DOUBLE_EQ(target.alpha, c.expected.at("alpha").get<double>());
    EXPECT_EQ(target.tail, c.expected.at("tail").get<int64_t>());
    if (c.expected.at("low").is_null()) {
      EXPECT_FALSE(target.low || target.high || target.rho_fp8);
      continue;
    }
    EXPECT_EQ(target.low, c.expected.at("low").get<double>());
    EXPECT_NEAR(target.rho_reference, c.expected.at("rho_reference").get<double>(), 1e-12);
    EXPECT_NEAR(target.high.value(), c.expected.at("high").get<double>(), 1e-12);
    EXPECT_NEAR(target.rho_fp8.value(), c.expected.at("rho_fp8").get<double>(), 1e-12);
    ClipBounds bounds = c.config.init;
    for (size_t i = 0; i < c.expected.at("low_path").size(); ++i) {
      EXPECT_NEAR(bounds.low, c.expected.at("low_path").at(i).get<double>(), 1e-12);
      EXPECT_NEAR(bounds.high, c.expected.at("high_path").at(i).get<double>(), 1e-12);
      bounds.low = damped(bounds.low, *target.low, c.config.low_damping);
      bounds.high = damped(bounds.high, *target.high, c.config.high_damping);
    }
  }
}

// The calibrator sees histograms: α and ρ of the reference exact, L* within a bin, H* within a
// grid step; and its bounds follow the path.
TEST(ClippingGolden, PooledTargets) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    ClipCalibrator calibrator(c.config);
    calibrator.add(c.tokens());
    const CalibrationTarget target = calibrator.target();
    EXPECT_DOUBLE_EQ(target.alpha, c.expected.at("alpha").get<double>());
    EXPECT_EQ(target.tail, c.expected.at("tail").get<int64_t>());
    if (c.expected.at("low").is_null()) {
      EXPECT_FALSE(calibrator.calibrate().low);
      EXPECT_EQ(calibrator.bounds().low, 0.6);
      EXPECT_EQ(calibrator.bounds().high, 1.8);
      EXPECT_EQ(calibrator.tail(), target.tail);  // kept for the next time
      continue;
    }
    const double low = c.expected.at("low").get<double>();
    EXPECT_GE(*target.low, low * (1 - 1e-12));
    EXPECT_LE(*target.low, low * std::exp(LogRatioHistogram::kBinWidth));
    EXPECT_NEAR(target.rho_reference, c.expected.at("rho_reference").get<double>(), 1e-12);
    EXPECT_NEAR(*target.high, c.expected.at("high").get<double>(), 0.02 + 1e-9);
    for (size_t i = 0; i < c.expected.at("low_path").size(); ++i) {
      EXPECT_NEAR(calibrator.bounds().low, c.expected.at("low_path").at(i).get<double>(), 0.002);
      EXPECT_NEAR(calibrator.bounds().high, c.expected.at("high_path").at(i).get<double>(), 0.0201);
      EXPECT_TRUE(calibrator.calibrate().low);
      EXPECT_EQ(calibrator.tail(), 0);
      calibrator.add(c.tokens());
    }
  }
}

// Half now and half later, or on another rank, is the same as the whole.
TEST(ClippingGolden, HalvesPoolToTheWhole) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const size_t num_tokens = c.advantage.size();
    const size_t half = num_tokens / 2;
    ClipCalibrator whole(c.config);
    whole.add(c.tokens());
    ClipCalibrator successive(c.config);
    successive.add(c.tokens(0, half));
    successive.add(c.tokens(half, num_tokens));
    EXPECT_EQ(whole.state(), successive.state());  // the same additions in the same order
    ClipCalibrator rank(c.config);
    ClipCalibrator other(c.config);
    rank.add(c.tokens(0, half));
    other.add(c.tokens(half, num_tokens));
    rank.add(other.pool());
    const CalibrationTarget a = whole.target();
    const CalibrationTarget b = rank.target();
    EXPECT_EQ(a.alpha, b.alpha);
    EXPECT_EQ(a.low, b.low);
    EXPECT_EQ(a.high, b.high);
    EXPECT_NEAR(a.rho_reference, b.rho_reference, 1e-12);
  }
}

}  // namespace
}  // namespace octet::rl
