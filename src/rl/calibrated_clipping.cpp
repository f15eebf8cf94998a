#include "rl/calibrated_clipping.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace octet::rl {

double balance(std::span<const double> ratio, std::span<const double> advantage,
               std::span<const double> weight, const ClipBounds& bounds) {
  OCTET_ASSERT(ratio.size() == advantage.size() && ratio.size() == weight.size());
  double positive = 0;
  double negative = 0;
  for (size_t t = 0; t < ratio.size(); ++t) {
    const double mass = weight[t] * ratio[t] * advantage[t];
    if (advantage[t] > 0 && ratio[t] < bounds.high) positive += mass;
    if (advantage[t] < 0 && ratio[t] > bounds.low) negative += mass;
  }
  return negative == 0 ? std::numeric_limits<double>::quiet_NaN()
                       : std::abs(positive) / std::abs(negative);
}

double damped(double bound, double target, double damping) {
  return bound + std::clamp((target - bound) / 2, -damping, damping);
}

std::vector<double> high_grid(const CalibrationConfig& config) {
  const BoundRange& range = config.high_range;
  const auto num_steps =
      static_cast<int64_t>(std::floor((range.most - range.least) / config.high_step + 1e-9));
  std::vector<double> grid;
  for (int64_t i = 0; i <= num_steps; ++i) {
    // Rounded to 12 decimals, so that a grid point is the float64 nearest its decimal name.
    const double point = range.least + static_cast<double>(i) * config.high_step;
    grid.push_back(std::round(point * 1e12) / 1e12);
  }
  return grid;
}

CalibrationTarget exact_target(const CalibrationConfig& config, const CalibrationTokens& tokens) {
  CalibrationTarget target;
  std::vector<double> fp8_negative;
  for (size_t t = 0; t < tokens.advantage.size(); ++t) {
    if (!(tokens.advantage[t] < 0)) continue;
    fp8_negative.push_back(tokens.ratio_fp8[t]);
    target.tail += tokens.ratio_reference[t] <= config.reference.low;
  }
  target.alpha = static_cast<double>(target.tail) / static_cast<double>(fp8_negative.size());
  target.rho_reference =
      balance(tokens.ratio_reference, tokens.advantage, tokens.weight, config.reference);
  if (target.tail < config.min_tail) return target;

  // The smallest ratio whose share reaches α = tail / n is the tail-th smallest.
  const auto quantile = fp8_negative.begin() + (target.tail - 1);
  std::nth_element(fp8_negative.begin(), quantile, fp8_negative.end());
  target.low = std::clamp(*quantile, config.low_range.least, config.low_range.most);

  double best = std::numeric_limits<double>::infinity();
  for (const double high : high_grid(config)) {
    const double rho =
        balance(tokens.ratio_fp8, tokens.advantage, tokens.weight, {*target.low, high});
    const double distance = std::abs(rho - target.rho_reference);  // NaN is never nearer
    if (distance < best) {
      best = distance;
      target.high = high;
      target.rho_fp8 = rho;
    }
  }
  return target;
}

MetricList calibration_metrics(const ClipBounds& bounds, const CalibrationTarget& target) {
  MetricList list{{"calibration/low", bounds.low}, {"calibration/high", bounds.high}};
  const auto add = [&](const char* name, double value) {
    if (std::isfinite(value)) list.emplace_back(name, value);
  };
  add("calibration/alpha", target.alpha);
  add("calibration/rho", target.rho_reference);
  add("calibration/tail", static_cast<double>(target.tail));
  if (target.low) add("calibration/low_target", *target.low);
  if (target.high) add("calibration/high_target", *target.high);
  if (target.rho_fp8) add("calibration/rho_fp8", *target.rho_fp8);
  return list;
}

}  // namespace octet::rl
