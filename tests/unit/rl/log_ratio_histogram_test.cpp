#include "rl/log_ratio_histogram.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace octet::rl {
namespace {

TEST(LogRatioHistogram, BinsAreClosedAbove) {
  constexpr double kWidth = LogRatioHistogram::kBinWidth;
  EXPECT_EQ(LogRatioHistogram::bin_of(0), 1023);
  EXPECT_EQ(LogRatioHistogram::bin_of(kWidth / 2), 1024);
  EXPECT_EQ(LogRatioHistogram::bin_of(kWidth), 1024);
  EXPECT_EQ(LogRatioHistogram::bin_of(-2), 0);
  EXPECT_EQ(LogRatioHistogram::bin_of(2), 2047);
  EXPECT_EQ(LogRatioHistogram::bin_of(200), 2047);
  EXPECT_EQ(LogRatioHistogram::bin_of(-std::numeric_limits<double>::infinity()), 0);
}

TEST(LogRatioHistogram, QuantilesOfTheSum) {
  LogRatioHistogram low;
  LogRatioHistogram high;
  for (int i = 1; i <= 1000; ++i) (i <= 500 ? low : high).add(-1 + 0.002 * i);  // (−1, 1]
  EXPECT_TRUE(std::isnan(LogRatioHistogram().ratio_quantile(0.5)));
  low.add(high);
  EXPECT_EQ(low.total(), 1000);
  for (const double share : {0.001, 0.1, 0.5, 0.99, 1.0}) {
    const double quantile = std::log(low.ratio_quantile(share));
    EXPECT_GE(quantile, -1 + 2 * share - 1e-9);
    EXPECT_LE(quantile, -1 + 2 * share + LogRatioHistogram::kBinWidth + 1e-9);
  }
  EXPECT_EQ(low.bin_reaching(1001), -1);
}

}  // namespace
}  // namespace octet::rl
