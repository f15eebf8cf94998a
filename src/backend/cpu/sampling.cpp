#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void log_probs(Context&, const ops::LogProbsArgs&) { OCTET_ASSERT(false); }
void log_probs_backward(Context&, const ops::LogProbsBackwardArgs&) { OCTET_ASSERT(false); }
void sample(Context&, const ops::SampleArgs&) { OCTET_ASSERT(false); }

}  // namespace octet::cpu
