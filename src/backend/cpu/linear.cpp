#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void linear(Context&, const ops::LinearArgs&) { OCTET_ASSERT(false); }
void linear_input_grad(Context&, const ops::LinearInputGradArgs&) { OCTET_ASSERT(false); }
void linear_weight_grad(Context&, const ops::LinearWeightGradArgs&) { OCTET_ASSERT(false); }

}  // namespace octet::cpu
