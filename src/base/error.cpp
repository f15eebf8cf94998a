#include "base/error.h"

namespace octet {

void invariant_failed(const char* condition, const char* file, int line) {
  throw std::logic_error(
      fmt::format("[{}:{}] internal error: {} does not hold", file, line, condition));
}

}  // namespace octet
