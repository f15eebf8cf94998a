#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void quantize(Context&, const ops::QuantizeArgs&) { OCTET_ASSERT(false); }
void dequantize(Context&, const ops::DequantizeArgs&) { OCTET_ASSERT(false); }

}  // namespace octet::cpu
