#include "base/log.h"

#include <mutex>

namespace octet {
namespace {
std::mutex sink_mutex;
LogSink& sink_slot() {
  static LogSink slot;
  return slot;
}
}  // namespace

void set_log_sink(LogSink sink) {
  std::lock_guard lock(sink_mutex);
  sink_slot() = std::move(sink);
}

void log_message(LogLevel level, std::string_view message) {
  std::lock_guard lock(sink_mutex);
  if (sink_slot()) sink_slot()(level, message);
}

}  // namespace octet
