// A request to stop that a signal handler may set and long work looks at between steps.
#pragma once

namespace octet {

void request_interrupt() noexcept;  // async-signal-safe
bool interrupted() noexcept;
void clear_interrupt() noexcept;

}  // namespace octet
