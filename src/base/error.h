// Errors that end the job. The library throws; only the program prints and chooses an exit code.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/core.h>

namespace octet {

// What went wrong, as "[where] what was required, what was given, what to do".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A configuration or command line that cannot be used (exit code 2).
class UsageError : public Error {
 public:
  using Error::Error;
};

// Throws Error("[where] message").
template <class... Args>
[[noreturn]] void fail(std::string_view where, fmt::format_string<Args...> message,
                       Args&&... args) {
  throw Error(fmt::format("[{}] {}", where, fmt::format(message, std::forward<Args>(args)...)));
}

// Throws UsageError("[where] message").
template <class... Args>
[[noreturn]] void fail_usage(std::string_view where, fmt::format_string<Args...> message,
                             Args&&... args) {
  throw UsageError(
      fmt::format("[{}] {}", where, fmt::format(message, std::forward<Args>(args)...)));
}

// What an error says that was met at `where`: "[where] message", unless it names that place itself.
std::string message_at(std::string_view where, const Error& error);

[[noreturn]] void invariant_failed(const char* condition, const char* file, int line);

}  // namespace octet

// For what cannot happen unless Octet itself is wrong; throws std::logic_error with the place.
#define OCTET_ASSERT(condition)                                  \
  do {                                                           \
    if (!(condition)) [[unlikely]]                               \
      ::octet::invariant_failed(#condition, __FILE__, __LINE__); \
  } while (false)
