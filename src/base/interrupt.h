// A request to stop that a signal handler may set and long work looks at between steps.
#pragma once

#include "base/error.h"

namespace octet {

void request_interrupt() noexcept;  // async-signal-safe
bool interrupted() noexcept;
void clear_interrupt() noexcept;

// Work was given up because of a request to stop; what was whole before it still is.
class Interrupted : public Error {
 public:
  Interrupted() : Error("[interrupt] stopped on request") {}
};
void throw_if_interrupted();

}  // namespace octet
