// The pooled side of Calibrated Clipping.
#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "rl/calibrated_clipping.h"

namespace octet::rl {
namespace {

constexpr size_t kNumBins = LogRatioHistogram::kNumBins;
constexpr int64_t kMaxCount = int64_t{1} << 50;  // of a bin in a saved state, so that sums hold

ClipPool empty_pool(size_t grid_size) {
  ClipPool pool;
  pool.fp8_negative_mass.assign(kNumBins, 0.0);
  pool.fp8_positive_mass.assign(grid_size, 0.0);
  return pool;
}

void check_config(const CalibrationConfig& c) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) fail_usage("clip", "{}", what);
  };
  const auto is_pair = [](const ClipBounds& b) {
    return b.low > 0 && b.low < 1 && b.high > 1 && std::isfinite(b.high);
  };
  require(c.interval >= 1, "calibration_interval must be at least 1");
  require(c.min_tail >= 1, "calibration_min_tail must be at least 1");
  require(is_pair(c.reference), "epsilon must lie in (0, 1) and epsilon_high be above 0");
  require(is_pair(c.init), "calibration_init must be [low, high] with 0 < low < 1 < high");
  require(c.low_range.least > 0 && c.low_range.least <= c.low_range.most,
          "the range of the lower bound must be positive and in order");
  require(c.high_step > 0 && c.high_range.least <= c.high_range.most &&
              (c.high_range.most - c.high_range.least) / c.high_step < 10'000,
          "the range of the upper bound must be in order and hold fewer than 10,000 steps");
  require(c.low_damping > 0 && c.high_damping > 0, "the damping must be above 0");
}

}  // namespace

void ClipPool::add(const ClipPool& other) {
  OCTET_ASSERT(fp8_positive_mass.size() == other.fp8_positive_mass.size());
  num_negative += other.num_negative;
  tail += other.tail;
  num_dropped += other.num_dropped;
  reference_positive += other.reference_positive;
  reference_negative += other.reference_negative;
  fp8_negative.add(other.fp8_negative);
  for (size_t i = 0; i < kNumBins; ++i) fp8_negative_mass[i] += other.fp8_negative_mass[i];
  for (size_t i = 0; i < fp8_positive_mass.size(); ++i) {
    fp8_positive_mass[i] += other.fp8_positive_mass[i];
  }
}

ClipCalibrator::ClipCalibrator(const CalibrationConfig& config)
    : config_(config), bounds_(config.init) {
  check_config(config);
  grid_ = high_grid(config);
  pool_ = empty_pool(grid_.size());
}

void ClipCalibrator::add(const CalibrationTokens& tokens) {
  const size_t num_tokens = tokens.advantage.size();
  OCTET_ASSERT(tokens.ratio_reference.size() == num_tokens &&
               tokens.ratio_fp8.size() == num_tokens && tokens.weight.size() == num_tokens);
  for (size_t t = 0; t < num_tokens; ++t) {
    const double advantage = tokens.advantage[t];
    const double ratio_reference = tokens.ratio_reference[t];
    const double ratio_fp8 = tokens.ratio_fp8[t];
    const double reference_mass = tokens.weight[t] * ratio_reference * advantage;
    const double fp8_mass = tokens.weight[t] * ratio_fp8 * advantage;
    if (!(std::isfinite(reference_mass) && std::isfinite(fp8_mass) && ratio_reference > 0 &&
          ratio_fp8 > 0)) {
      ++pool_.num_dropped;
    } else if (advantage > 0) {
      if (ratio_reference < config_.reference.high) pool_.reference_positive += reference_mass;
      for (size_t i = grid_.size(); i-- > 0 && ratio_fp8 < grid_[i];) {
        pool_.fp8_positive_mass[i] += fp8_mass;
      }
    } else if (advantage < 0) {
      ++pool_.num_negative;
      pool_.tail += ratio_reference <= config_.reference.low;
      if (ratio_reference > config_.reference.low) pool_.reference_negative += reference_mass;
      const double log_ratio = std::log(ratio_fp8);
      pool_.fp8_negative.add(log_ratio);
      pool_.fp8_negative_mass[static_cast<size_t>(LogRatioHistogram::bin_of(log_ratio))] +=
          fp8_mass;
    }
  }
}

CalibrationTarget ClipCalibrator::target() const {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const auto rho = [](double positive, double negative) {
    return negative == 0 ? kNaN : std::abs(positive) / std::abs(negative);
  };
  CalibrationTarget target;
  target.tail = pool_.tail;
  target.alpha = static_cast<double>(pool_.tail) / static_cast<double>(pool_.num_negative);
  target.rho_reference = rho(pool_.reference_positive, pool_.reference_negative);
  if (pool_.tail < config_.min_tail) return target;

  // As in exact_target, the tail-th smallest ratio: here the upper edge of its bin.
  int low_bin = pool_.fp8_negative.bin_reaching(pool_.tail);
  const double quantile = std::exp(LogRatioHistogram::edge(low_bin + 1));
  target.low = std::clamp(quantile, config_.low_range.least, config_.low_range.most);
  if (*target.low != quantile) low_bin = LogRatioHistogram::bin_of(std::log(*target.low));

  double negative = 0;  // above L*
  for (size_t i = static_cast<size_t>(low_bin) + 1; i < kNumBins; ++i) {
    negative += pool_.fp8_negative_mass[i];
  }
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < grid_.size(); ++i) {
    const double rho_fp8 = rho(pool_.fp8_positive_mass[i], negative);
    const double distance = std::abs(rho_fp8 - target.rho_reference);
    if (distance < best) {
      best = distance;
      target.high = grid_[i];
      target.rho_fp8 = rho_fp8;
    }
  }
  return target;
}

CalibrationTarget ClipCalibrator::calibrate() {
  const CalibrationTarget result = target();
  if (!result.low) return result;
  bounds_.low = damped(bounds_.low, *result.low, config_.low_damping);
  if (result.high) bounds_.high = damped(bounds_.high, *result.high, config_.high_damping);
  pool_ = empty_pool(grid_.size());
  return result;
}

Json ClipCalibrator::state() const {
  Json negative = Json::array();  // [bin, count, mass] of the bins that hold something
  for (size_t i = 0; i < kNumBins; ++i) {
    const int64_t count = pool_.fp8_negative.counts()[i];
    if (count != 0) negative.push_back({i, count, pool_.fp8_negative_mass[i]});
  }
  return Json{{"low", bounds_.low},
              {"high", bounds_.high},
              {"num_negative", pool_.num_negative},
              {"tail", pool_.tail},
              {"num_dropped", pool_.num_dropped},
              {"reference_positive", pool_.reference_positive},
              {"reference_negative", pool_.reference_negative},
              {"fp8_negative", std::move(negative)},
              {"fp8_positive_mass", pool_.fp8_positive_mass}};
}

void ClipCalibrator::restore(const Json& state) {
  try {
    ClipPool pool = empty_pool(grid_.size());
    const ClipBounds bounds{state.at("low").get<double>(), state.at("high").get<double>()};
    pool.num_negative = state.at("num_negative").get<int64_t>();
    pool.tail = state.at("tail").get<int64_t>();
    pool.num_dropped = state.at("num_dropped").get<int64_t>();
    pool.reference_positive = state.at("reference_positive").get<double>();
    pool.reference_negative = state.at("reference_negative").get<double>();
    for (const Json& entry : state.at("fp8_negative")) {
      const auto bin = entry.at(0).get<size_t>();
      const auto count = entry.at(1).get<int64_t>();
      if (bin >= kNumBins || count < 0 || count > kMaxCount) {
        fail("calibration state", "bin {} with {} tokens is out of range", bin, count);
      }
      pool.fp8_negative.counts()[bin] = count;
      pool.fp8_negative_mass[bin] = entry.at(2).get<double>();
    }
    pool.fp8_positive_mass = state.at("fp8_positive_mass").get<std::vector<double>>();
    if (pool.fp8_positive_mass.size() != grid_.size()) {
      fail("calibration state", "{} sums over the grid are required, but it holds {}", grid_.size(),
           pool.fp8_positive_mass.size());
    }
    if (pool.fp8_negative.total() != pool.num_negative || pool.tail < 0 ||
        pool.tail > pool.num_negative) {
      fail("calibration state", "counts do not add up ({} tokens, tail {})", pool.num_negative,
           pool.tail);
    }
    bounds_ = bounds;
    pool_ = std::move(pool);
  } catch (const nlohmann::json::exception& error) {
    fail("calibration state", "a calibrator's state is required, but: {}", error.what());
  }
}

}  // namespace octet::rl
