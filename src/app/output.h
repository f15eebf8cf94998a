// Results go to standard output. A write that fails is an Error: a reader may have gone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "observe/progress.h"

namespace octet::app {

void print(std::string_view text);       // and flushes
void print_line(std::string_view text);  // with a line feed

// JSON text. Numbers read back as the same float32; infinities are null. Bytes that are no UTF-8
// become U+FFFD.
std::string json_string(std::string_view text);
std::string json_ids(std::span<const int32_t> ids);
std::string json_numbers(std::span<const float> values);

// What stands in the place of a line that cannot be served: {"error":"…"}, or "" and a message on
// standard error.
std::string report_line_error(std::string_view message, bool json);

// A bar on standard error where that is a terminal and the results go elsewhere; else it is silent.
observe::Progress progress_bar(std::string label, int64_t total, std::string unit);

}  // namespace octet::app
