#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void rope(Context&, const ops::RopeArgs&) { OCTET_ASSERT(false); }

}  // namespace octet::cpu
