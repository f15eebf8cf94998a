// Histogram of log-ratios. Histograms of micro-batches and ranks add; quantiles are taken of the
// sum and never averaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octet::rl {

// 2,048 equal bins on [−2, 2]; what lies outside falls into the first or the last. Bin i holds
// log r in (edge(i), edge(i + 1)].
class LogRatioHistogram {
 public:
  static constexpr int kNumBins = 2048;
  static constexpr double kLowest = -2.0;
  static constexpr double kBinWidth = 4.0 / kNumBins;

  static double edge(int bin) { return kLowest + bin * kBinWidth; }
  static int bin_of(double log_ratio);  // log_ratio not NaN

  void add(double log_ratio) { ++counts_[static_cast<size_t>(bin_of(log_ratio))]; }
  void add(const LogRatioHistogram& other);

  int64_t total() const;
  // The first bin at which the running count reaches `count` (≥ 1); −1 where the total is less.
  int bin_reaching(int64_t count) const;
  // exp of the upper edge of the bin at which the share of counts reaches `share` in (0, 1]; NaN
  // where the histogram is empty.
  double ratio_quantile(double share) const;

  const std::vector<int64_t>& counts() const { return counts_; }
  std::vector<int64_t>& counts() { return counts_; }

 private:
  std::vector<int64_t> counts_ = std::vector<int64_t>(kNumBins);
};

}  // namespace octet::rl
