// Files of JSON lines that a run appends to: metrics.jsonl, events.jsonl and samples.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace octet::observe {

// Metrics by name, in the order they are reported. What nobody computed is absent, not 0.
using MetricList = std::vector<std::pair<std::string, double>>;

// A file opened for appending; what stands behind its last line feed is taken off, and each line
// reaches the operating system at once. Throws Error where it cannot be written.
class JsonLinesFile {
 public:
  explicit JsonLinesFile(std::string path);
  ~JsonLinesFile();
  JsonLinesFile(const JsonLinesFile&) = delete;
  JsonLinesFile& operator=(const JsonLinesFile&) = delete;

  void append(std::string_view line);  // without the newline
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int file_ = -1;
};

// metrics.jsonl: {"step":N,"name":value,…} per step, numbers that read back as the same double, NaN
// and infinities as null.
class MetricsFile {
 public:
  // Lines of steps beyond `last_step` (and a last line that was cut short) are dropped first: a
  // resumed run writes them again. -1 keeps nothing.
  MetricsFile(const std::string& path, int64_t last_step);
  void write(int64_t step, const MetricList& metrics);

 private:
  JsonLinesFile file_;
};

// The line that MetricsFile writes.
std::string metrics_line(int64_t step, const MetricList& metrics);

// The values of one metric over the steps of a metrics.jsonl; steps without it are left out, null
// is NaN.
struct MetricCurve {
  std::vector<int64_t> steps;
  std::vector<double> values;
};
MetricCurve read_metric(const std::string& path, std::string_view name);

// events.jsonl: {"time":"2026-01-31T12:00:00Z","step":N,"kind":K,"message":M,…details}.
class EventsFile {
 public:
  explicit EventsFile(const std::string& path) : file_(path) {}
  void write(int64_t step, std::string_view kind, std::string_view message);
  void write(int64_t step, std::string_view kind, std::string_view message, const Json& details);

 private:
  JsonLinesFile file_;
};

// A sample as completions/ keeps it.
struct CompletionRecord {
  std::string prompt;
  std::string completion;  // bytes that are no UTF-8 are written as U+FFFD
  int64_t num_tokens = 0;
  std::string finish_reason;
  double reward = 0;   // NaN: none, written as null
  MetricList rewards;  // by function
  double advantage = 0;
};

// Writes FOLDER/step-000010.jsonl, one record per line; replaces a file that is there.
void write_completions(const std::string& folder, int64_t step,
                       std::span<const CompletionRecord> records);

// "step-000010".
std::string step_name(int64_t step);

}  // namespace octet::observe
