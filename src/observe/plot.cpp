#include "observe/plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace octet::observe {
namespace {

// A grid of dots, several to a character.
class Canvas {
 public:
  Canvas(int columns, int rows, bool unicode)
      : unicode_(unicode),
        width_(columns * (unicode ? 2 : 1)),
        height_(rows * (unicode ? 4 : 1)),
        dots_(static_cast<size_t>(width_) * height_, false) {}

  int width() const { return width_; }
  int height() const { return height_; }

  void set(int x, int y) { dots_[static_cast<size_t>(y) * width_ + x] = true; }

  void line(int x0, int y0, int x1, int y1) {
    const int steps = std::max({std::abs(x1 - x0), std::abs(y1 - y0), 1});
    for (int i = 0; i <= steps; ++i) {
      set(x0 + static_cast<int>(std::lround(static_cast<double>(x1 - x0) * i / steps)),
          y0 + static_cast<int>(std::lround(static_cast<double>(y1 - y0) * i / steps)));
    }
  }

  std::string row(int row) const {
    std::string text;
    if (!unicode_) {
      for (int x = 0; x < width_; ++x) text += get(x, row) ? '*' : ' ';
      return text;
    }
    // Braille: U+2800 plus one bit per dot, the left column 1 2 4 40, the right 8 10 20 80 (hex).
    constexpr unsigned kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    for (int x = 0; x < width_; x += 2) {
      unsigned bits = 0;
      for (int dy = 0; dy < 4; ++dy) {
        for (int dx = 0; dx < 2; ++dx) {
          if (get(x + dx, row * 4 + dy)) bits |= kBits[dy][dx];
        }
      }
      text += static_cast<char>(0xE2);
      text += static_cast<char>(0xA0 | (bits >> 6));
      text += static_cast<char>(0x80 | (bits & 0x3F));
    }
    return text;
  }

 private:
  bool get(int x, int y) const { return dots_[static_cast<size_t>(y) * width_ + x]; }
  bool unicode_;
  int width_;
  int height_;
  std::vector<bool> dots_;
};

int scaled(double value, double low, double high, int size) {
  const double share = high > low ? (value - low) / (high - low) : 0.5;
  return std::clamp(static_cast<int>(std::lround(share * (size - 1))), 0, size - 1);
}

}  // namespace

std::string plot_curve(const MetricCurve& curve, const PlotOptions& options) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const double value : curve.values) {
    if (!std::isfinite(value)) continue;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (low > high) return fmt::format("{}: nothing to draw\n", options.title);
  if (low == high) {  // a flat curve goes through the middle
    const double margin = std::max(1e-6, std::abs(low) * 0.1);
    low -= margin;
    high += margin;
  }
  const std::string labels[] = {fmt::format("{:.3g}", high),
                                fmt::format("{:.3g}", (low + high) / 2),
                                fmt::format("{:.3g}", low)};
  const size_t label_width = std::max({labels[0].size(), labels[1].size(), labels[2].size()});
  const int rows = std::max(3, options.rows);
  const int columns = std::max(10, options.columns - static_cast<int>(label_width) - 2);
  Canvas canvas(columns, rows, options.unicode);
  const auto first = static_cast<double>(curve.steps.front());
  const auto last = static_cast<double>(curve.steps.back());
  for (size_t i = 0; i < curve.values.size(); ++i) {
    if (!std::isfinite(curve.values[i])) continue;
    const auto x = [&](size_t k) {
      return scaled(static_cast<double>(curve.steps[k]), first, last, canvas.width());
    };
    const auto y = [&](size_t k) {
      return canvas.height() - 1 - scaled(curve.values[k], low, high, canvas.height());
    };
    const size_t from = i > 0 && std::isfinite(curve.values[i - 1]) ? i - 1 : i;
    canvas.line(x(from), y(from), x(i), y(i));
  }

  const char* wall = options.unicode ? "┤" : "|";
  std::string out = options.title.empty() ? "" : options.title + "\n";
  for (int row = 0; row < rows; ++row) {
    const std::string_view label = row == 0          ? labels[0]
                                   : row == rows / 2 ? labels[1]
                                   : row == rows - 1 ? labels[2]
                                                     : std::string_view();
    out += fmt::format("{:>{}} {}{}\n", label, label_width, wall, canvas.row(row));
  }
  const std::string indent(label_width + 1, ' ');
  std::string floor;
  for (int i = 0; i < columns; ++i) floor += options.unicode ? "─" : "-";
  out += fmt::format("{}{}{}\n", indent, options.unicode ? "└" : "+", floor);
  const std::string left = std::to_string(curve.steps.front());
  const std::string right = std::to_string(curve.steps.back());
  const int middle =
      std::max(static_cast<int>(options.x_label.size()) + 2,
               columns - static_cast<int>(left.size()) - static_cast<int>(right.size()));
  out += fmt::format("{} {}{:^{}}{}\n", indent, left, options.x_label, middle, right);
  return out;
}

std::vector<double> moving_average(std::span<const double> values, int window) {
  std::vector<double> means;
  for (size_t i = 0; i < values.size(); ++i) {
    double sum = 0;
    int count = 0;
    for (size_t k = i + 1 >= static_cast<size_t>(window) ? i + 1 - window : 0; k <= i; ++k) {
      if (std::isnan(values[k])) continue;
      sum += values[k];
      ++count;
    }
    means.push_back(count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN());
  }
  return means;
}

double quantile(std::vector<double> values, double q) {
  std::erase_if(values, [](double value) { return std::isnan(value); });
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  const double share = place - static_cast<double>(below);
  // The ends are exact, and infinities do not become NaN.
  if (share == 0 || values[below] == values[above]) return values[below];
  return values[below] + share * (values[above] - values[below]);
}

}  // namespace octet::observe
