// Messages of the library. Nothing is printed unless the program installs a sink.
#pragma once

#include <functional>
#include <string_view>
#include <utility>

#include <fmt/core.h>

namespace octet {

enum class LogLevel { kInfo, kWarning };

using LogSink = std::function<void(LogLevel, std::string_view)>;

// Replaces the sink; an empty function silences. Call it before threads start.
void set_log_sink(LogSink sink);
void log_message(LogLevel level, std::string_view message);

template <class... Args>
void log_info(fmt::format_string<Args...> message, Args&&... args) {
  log_message(LogLevel::kInfo, fmt::format(message, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> message, Args&&... args) {
  log_message(LogLevel::kWarning, fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace octet
