#include "base/error.h"

namespace octet {

std::string message_at(std::string_view where, const Error& error) {
  const std::string place = fmt::format("[{}] ", where);
  const std::string_view message = error.what();
  return message.starts_with(place) ? std::string(message) : place + error.what();
}

void invariant_failed(const char* condition, const char* file, int line) {
  throw std::logic_error(
      fmt::format("[{}:{}] internal error: {} does not hold", file, line, condition));
}

}  // namespace octet
