#include "app/output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"

namespace octet::app {

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fail("output", "standard output must take the results, but: {}", std::strerror(errno));
  }
}

void print_line(std::string_view text) { print(std::string(text) + "\n"); }

std::string json_string(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string json_ids(std::span<const int32_t> ids) {
  return fmt::format("[{}]", fmt::join(ids, ","));
}

std::string json_numbers(std::span<const float> values) {
  std::string text = "[";
  for (const float value : values) {
    if (text.size() > 1) text += ',';
    text += json_number(value);
  }
  return text + "]";
}

std::string report_line_error(std::string_view message, bool json) {
  if (json) return "{\"error\":" + json_string(message) + "}";
  log_warning("{}", message);
  return "";
}

observe::Progress progress_bar(std::string label, int64_t total, std::string unit) {
  const bool shown = observe::stderr_is_terminal() && isatty(STDOUT_FILENO) == 0;
  observe::ProgressOptions options;
  options.label = std::move(label);
  options.total = total;
  options.unit = std::move(unit);
  options.terminal = shown;
  options.unicode = observe::locale_is_utf8();
  options.columns = observe::stderr_columns();
  options.write = [shown](std::string_view text) {
    if (!shown) return;
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  return observe::Progress(std::move(options));
}

}  // namespace octet::app
