// A curve as text, for the end of a run in a terminal.
#pragma once

#include <span>
#include <string>

#include "observe/metrics.h"

namespace octet::observe {

struct PlotOptions {
  std::string title = {};
  std::string x_label = "step";
  int columns = 72;     // of the whole picture
  int rows = 12;        // of the curve
  bool unicode = true;  // braille dots (2 × 4 per character), else '*'
};

// The points, joined by lines, between axes labelled with their ends. Points that are not finite
// leave a gap. Ends with a newline; without a finite point it says so. Steps must not decrease.
std::string plot_curve(const MetricCurve& curve, const PlotOptions& options);

// The mean over each window of at most `window` values that ends at a point (NaN left out); a
// noisy curve becomes readable.
std::vector<double> moving_average(std::span<const double> values, int window);

// The smallest value whose share of the sorted values reaches q, linearly interpolated between
// neighbours (as NumPy's default); NaN are left out, NaN where nothing is left. q in [0, 1].
double quantile(std::vector<double> values, double q);

}  // namespace octet::observe
