// Calibrated Clipping (arXiv 2609.22870): moves the clip bounds of FP8 training so that it cuts the
// share of gradients that BF16 would cut.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/json.h"
#include "rl/log_ratio_histogram.h"
#include "rl/losses.h"

namespace octet::rl {

struct BoundRange {
  double least;
  double most;
};

struct CalibrationConfig {
  int64_t interval = 20;            // steps between two calibrations
  int64_t min_tail = 100;           // reference tokens at or below the lower bound that it takes
  ClipBounds reference{0.8, 1.24};  // what BF16 would clip at: 1 − ε, 1 + ε_high
  ClipBounds init{0.6, 1.8};        // where the FP8 bounds start
  BoundRange low_range{0.5, 0.9};
  BoundRange high_range{1.2, 2.0};
  double high_step = 0.02;    // grid of H over high_range
  double low_damping = 0.05;  // δ_L: the most that a bound moves at once
  double high_damping = 0.10;
};

// Per token of the mini-batches after the first; all spans have the same length [N].
struct CalibrationTokens {
  std::span<const double> ratio_reference;  // r of the BF16 passes
  std::span<const double> ratio_fp8;        // r as trained
  std::span<const double> advantage;
  std::span<const double> weight;  // w·μ = min(π_old/μ, 2)·μ(y_t)
};

// ---- The definitions, on token arrays, in float64 ----

// |Σ_{A>0} w r A·1{r < high}| / |Σ_{A<0} w r A·1{r > low}|; NaN where the denominator is 0.
double balance(std::span<const double> ratio, std::span<const double> advantage,
               std::span<const double> weight, const ClipBounds& bounds);

struct CalibrationTarget {
  int64_t tail = 0;  // tokens with A < 0 and r_reference ≤ reference.low
  double alpha = 0;  // their share of the tokens with A < 0; NaN where there is none
  double rho_reference = 0;
  // Absent where the tail is shorter than min_tail (all three), or where a balance has no value.
  std::optional<double> low;      // L*, clamped to its range
  std::optional<double> high;     // H*, of the grid
  std::optional<double> rho_fp8;  // at (L*, H*)
};

CalibrationTarget exact_target(const CalibrationConfig& config, const CalibrationTokens& tokens);

// b + clip((target − b)/2, −damping, damping).
double damped(double bound, double target, double damping);

// The grid of H, in rising order.
std::vector<double> high_grid(const CalibrationConfig& config);

// ---- Pooling ----

// Sums of what calibrations need; pools of ranks and of successive calibrations add.
struct ClipPool {
  int64_t num_negative = 0;  // tokens with A < 0
  int64_t tail = 0;
  int64_t num_dropped = 0;  // tokens left out for a ratio, advantage or weight that is not finite
  double reference_positive = 0;          // Σ_{A>0} w r A·1{r < reference.high}
  double reference_negative = 0;          // Σ_{A<0} w r A·1{r > reference.low}
  LogRatioHistogram fp8_negative;         // log r_FP8 of the tokens with A < 0
  std::vector<double> fp8_negative_mass;  // [kNumBins] Σ w r A by the bin of log r, A < 0
  std::vector<double> fp8_positive_mass;  // [grid] Σ_{A>0} w r A·1{r < H}

  void add(const ClipPool& other);
};

class ClipCalibrator {
 public:
  // Throws UsageError where the configuration cannot be used.
  explicit ClipCalibrator(const CalibrationConfig& config);

  const CalibrationConfig& config() const { return config_; }
  const ClipBounds& bounds() const { return bounds_; }  // what the loss clips at now
  const ClipPool& pool() const { return pool_; }
  int64_t tail() const { return pool_.tail; }

  // Whether the batch of `step` (counted from 0) is to be measured: every `interval` steps.
  bool is_due(int64_t step) const { return step % config_.interval == 0; }

  void add(const CalibrationTokens& tokens);
  void add(const ClipPool& other) { pool_.add(other); }  // of another rank

  // The target of the pool: α and the balances are counted exactly, L* is an edge of a histogram
  // bin.
  CalibrationTarget target() const;
  // Where the tail is long enough moves both bounds and empties the pool, else changes nothing.
  // Returns the target, whose `low` says whether they moved.
  CalibrationTarget calibrate();

  // Bounds and pool. Restoring and writing again gives the same bytes. restore() throws
  // where the state does not fit the configuration.
  Json state() const;
  void restore(const Json& state);

 private:
  CalibrationConfig config_;
  std::vector<double> grid_;
  ClipBounds bounds_;
  ClipPool pool_;
};

// `calibration/{low,high}` (the bounds in force), `calibration/{alpha,rho,tail}` and the targets
// where they have a value.
MetricList calibration_metrics(const ClipBounds& bounds, const CalibrationTarget& target);

}  // namespace octet::rl
