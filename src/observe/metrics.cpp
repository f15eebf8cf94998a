#include "observe/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"

namespace octet::observe {
namespace {

std::string json_text(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

std::string members(const MetricList& metrics) {
  std::string out;
  for (const auto& [name, value] : metrics) {
    if (!out.empty()) out += ',';
    out += fmt::format("{}:{}", json_text(name), number(value));
  }
  return out;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

// Rewrites the file with its whole lines of steps up to `last_step`.
void drop_steps_after(const std::string& path, int64_t last_step) {
  if (!std::filesystem::exists(path)) return;
  const std::string content = read_file(path);
  std::string kept;
  for (size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    const std::string_view line = std::string_view(content).substr(begin, end - begin);
    const Json entry = Json::parse(line, nullptr, false);
    if (!entry.is_object() || !entry.contains("step") || !entry["step"].is_number_integer()) break;
    if (entry["step"].get<int64_t>() <= last_step) kept.append(line).append("\n");
  }
  if (kept != content) write_file_atomically(path, kept);
}

}  // namespace

JsonLinesFile::JsonLinesFile(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file_ < 0) fail(path_, "the file cannot be written: {}", std::strerror(errno));
  // What a killed process left of a line would swallow the next.
  if (!std::filesystem::is_regular_file(path_)) return;
  const std::string content = read_file(path_);
  const size_t num_whole = content.rfind('\n') + 1;  // npos + 1 = 0
  if (num_whole < content.size() && ::ftruncate(file_, static_cast<off_t>(num_whole)) != 0) {
    fail(path_, "a broken last line cannot be taken off: {}", std::strerror(errno));
  }
}

JsonLinesFile::~JsonLinesFile() { ::close(file_); }

void JsonLinesFile::append(std::string_view line) {
  const std::string text = fmt::format("{}\n", line);
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      fail(path_, "a line cannot be written: {}; free some space and resume the run",
           std::strerror(errno));
    }
    done += static_cast<size_t>(count);
  }
}

MetricsFile::MetricsFile(const std::string& path, int64_t last_step)
    : file_((drop_steps_after(path, last_step), path)) {}

void MetricsFile::write(int64_t step, const MetricList& metrics) {
  file_.append(metrics_line(step, metrics));
}

std::string metrics_line(int64_t step, const MetricList& metrics) {
  return fmt::format("{{\"step\":{}{}{}}}", step, metrics.empty() ? "" : ",", members(metrics));
}

MetricCurve read_metric(const std::string& path, std::string_view name) {
  MetricCurve curve;
  int line_number = 0;
  for (const std::string& line : split(read_file(path), '\n')) {
    ++line_number;
    if (line.empty()) continue;
    const Json entry = parse_json(line, fmt::format("{}:{}", path, line_number));
    const auto step = entry.find("step");
    if (step == entry.end() || !step->is_number_integer()) {
      fail(fmt::format("{}:{}", path, line_number), "a line of metrics must have a \"step\"");
    }
    const auto value = entry.find(name);
    if (value == entry.end() || !(value->is_number() || value->is_null())) continue;
    curve.steps.push_back(step->get<int64_t>());
    curve.values.push_back(value->is_null() ? std::numeric_limits<double>::quiet_NaN()
                                            : value->get<double>());
  }
  return curve;
}

void EventsFile::write(int64_t step, std::string_view kind, std::string_view message) {
  write(step, kind, message, Json::object());
}

void EventsFile::write(int64_t step, std::string_view kind, std::string_view message,
                       const Json& details) {
  Json entry = {{"time", utc_now()}, {"step", step}, {"kind", kind}, {"message", message}};
  for (const auto& [name, value] : details.items()) entry[name] = value;
  file_.append(entry.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void write_completions(const std::string& folder, int64_t step,
                       std::span<const CompletionRecord> records) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder, "the folder cannot be made: {}", error.message());
  std::string text;
  for (const CompletionRecord& record : records) {
    text += fmt::format(
        "{{\"step\":{},\"prompt\":{},\"completion\":{},\"num_tokens\":{},\"finish_reason\":{},"
        "\"reward\":{},\"rewards\":{{{}}},\"advantage\":{}}}\n",
        step, json_text(record.prompt), json_text(record.completion), record.num_tokens,
        json_text(record.finish_reason), number(record.reward), members(record.rewards),
        number(record.advantage));
  }
  write_file_atomically(fmt::format("{}/{}.jsonl", folder, step_name(step)), text);
}

std::string step_name(int64_t step) { return fmt::format("step-{:06}", step); }

}  // namespace octet::observe
