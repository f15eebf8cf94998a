#include "base/interrupt.h"

#include <atomic>

namespace octet {
namespace {
std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free);
}  // namespace

void request_interrupt() noexcept { flag.store(true); }
bool interrupted() noexcept { return flag.load(); }
void clear_interrupt() noexcept { flag.store(false); }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted();
}

}  // namespace octet
