#include "rl/log_ratio_histogram.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace octet::rl {

int LogRatioHistogram::bin_of(double log_ratio) {
  const double bin = std::ceil((log_ratio - kLowest) / kBinWidth) - 1;
  return static_cast<int>(std::clamp(bin, 0.0, kNumBins - 1.0));
}

void LogRatioHistogram::add(const LogRatioHistogram& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
}

int64_t LogRatioHistogram::total() const {
  return std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
}

int LogRatioHistogram::bin_reaching(int64_t count) const {
  int64_t running = 0;
  for (int bin = 0; bin < kNumBins; ++bin) {
    running += counts_[static_cast<size_t>(bin)];
    if (running >= count) return bin;
  }
  return -1;
}

double LogRatioHistogram::ratio_quantile(double share) const {
  const int64_t num_values = total();
  if (num_values == 0) return std::numeric_limits<double>::quiet_NaN();
  const double count = std::ceil(share * static_cast<double>(num_values));
  const int64_t wanted = std::clamp(static_cast<int64_t>(count), int64_t{1}, num_values);
  return std::exp(edge(bin_reaching(wanted) + 1));
}

}  // namespace octet::rl
