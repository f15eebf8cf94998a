#include "observe/plot.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace octet::observe {
namespace {

TEST(Plot, ADiagonalInPlainCharacters) {
  const MetricCurve curve{{1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}};
  const PlotOptions options{.title = "reward", .columns = 16, .rows = 5, .unicode = false};
  EXPECT_EQ(plot_curve(curve, options),
            "reward\n"
            "4 |           **\n"
            "  |        ***  \n"
            "2 |     ***     \n"
            "  |  ***        \n"
            "0 |**           \n"
            "  +-------------\n"
            "   1   step    5\n");
}

TEST(Plot, BrailleDots) {
  const MetricCurve curve{{0, 10}, {0, 1}};
  const std::string text = plot_curve(curve, {.columns = 15, .rows = 3});
  // U+2860 has the dot at the bottom left, U+280A the one at the top right.
  EXPECT_NE(text.find("0 ┤⡠"), std::string::npos) << text;
  EXPECT_NE(text.find("⠊\n"), std::string::npos) << text;
  EXPECT_NE(text.find("└─"), std::string::npos) << text;
}

TEST(Plot, GapsFlatAndEmptyCurves) {
  const double nan = std::nan("");
  EXPECT_EQ(plot_curve({}, {.title = "kl"}), "kl: nothing to draw\n");
  EXPECT_EQ(plot_curve({{1}, {nan}}, {.title = "kl"}), "kl: nothing to draw\n");
  const std::string flat = plot_curve({{5}, {2}}, {.columns = 20, .rows = 5, .unicode = false});
  EXPECT_NE(flat.find('*'), std::string::npos);
  const std::string gap =
      plot_curve({{1, 2, 3}, {1, nan, 1}}, {.columns = 23, .rows = 3, .unicode = false});
  EXPECT_EQ(std::count(gap.begin(), gap.end(), '*'), 2) << gap;
}

TEST(Statistics, MovingAverage) {
  const std::vector<double> values = {1, 2, std::nan(""), 6};
  const std::vector<double> means = moving_average(values, 2);
  EXPECT_EQ(means[0], 1);
  EXPECT_EQ(means[1], 1.5);
  EXPECT_EQ(means[2], 2);
  EXPECT_EQ(means[3], 6);
}

TEST(Statistics, QuantilesAsNumPyHasThem) {
  const std::vector<double> values = {3, 1, std::nan(""), 2, 4};
  EXPECT_EQ(quantile(values, 0), 1);
  EXPECT_EQ(quantile(values, 1), 4);
  EXPECT_EQ(quantile(values, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile(values, 0.9), 3.7);
  EXPECT_TRUE(std::isnan(quantile({}, 0.5)));
  EXPECT_EQ(quantile({-INFINITY, 0, INFINITY}, 1), INFINITY);
}

}  // namespace
}  // namespace octet::observe
