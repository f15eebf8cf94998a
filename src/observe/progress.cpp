#include "observe/progress.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

namespace octet::observe {
namespace {

double steady_seconds() {
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

// The first `columns` characters of a UTF-8 text.
std::string_view clipped(std::string_view text, size_t columns) {
  size_t end = 0;
  for (size_t shown = 0; end < text.size(); ++end) {
    const bool starts_character = (static_cast<unsigned char>(text[end]) & 0xC0) != 0x80;
    if (starts_character && shown++ == columns) break;
  }
  return text.substr(0, end);
}

}  // namespace

Progress::Progress(ProgressOptions options) : options_(std::move(options)) {
  if (!options_.seconds) options_.seconds = steady_seconds;
  started_ = options_.seconds();
}

Progress::~Progress() { finish(); }

std::string Progress::status(int64_t done) const {
  const double elapsed = options_.seconds() - started_;
  const int64_t here = done - options_.start;
  if (here <= 0 || !(elapsed > 0)) return "";
  const double rate = static_cast<double>(here) / elapsed;
  const std::string speed = rate >= 1 ? fmt::format("{:.1f} {}/s", rate, options_.unit)
                                      : fmt::format("{:.1f} s/{}", 1 / rate, options_.unit);
  const auto left = static_cast<double>(std::max<int64_t>(0, options_.total - done));
  return fmt::format("{}, {}", speed,
                     done >= options_.total ? "took " + format_duration(elapsed)
                                            : format_duration(left / rate) + " left");
}

std::string Progress::bar_line(int64_t done, std::string_view note) const {
  constexpr int kCells = 24;
  const double share =
      options_.total > 0
          ? std::clamp(static_cast<double>(done) / static_cast<double>(options_.total), 0.0, 1.0)
          : 0.0;
  const int full = static_cast<int>(share * kCells);
  std::string bar;
  for (int i = 0; i < kCells; ++i) {
    bar += options_.unicode ? (i < full ? "█" : "░") : (i < full ? "#" : ".");
  }
  std::string line = fmt::format("{} {} {}/{}", options_.label, bar, done, options_.total);
  if (const std::string tail = status(done); !tail.empty()) line += "  " + tail;
  if (!note.empty()) line += fmt::format("  {}", note);
  return std::string(clipped(line, static_cast<size_t>(std::max(20, options_.columns - 1))));
}

void Progress::update(int64_t done, std::string_view note) {
  if (options_.terminal) {
    shown_ = bar_line(done, note);
    options_.write("\r\x1b[K" + shown_);
  } else if (done % std::max<int64_t>(1, options_.lines_every) == 0 || done == options_.total) {
    std::string line = fmt::format("{} {}/{}", options_.label, done, options_.total);
    if (!note.empty()) line += fmt::format("  {}", note);
    if (const std::string tail = status(done); !tail.empty()) line += "  " + tail;
    options_.write(line + "\n");
  }
}

void Progress::message(std::string_view text) {
  if (shown_.empty()) {
    options_.write(fmt::format("{}\n", text));
  } else {
    options_.write(fmt::format("\r\x1b[K{}\n{}", text, shown_));
  }
}

void Progress::finish() {
  if (shown_.empty()) return;
  options_.write("\n");
  shown_.clear();
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  const int64_t hours = total / 3600;
  const int64_t minutes = total / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60)
                   : fmt::format("{}:{:02}", minutes, total % 60);
}

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

int stderr_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string lower(value);
    std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
  }
  return false;
}

}  // namespace octet::observe
