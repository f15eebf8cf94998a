#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void kv_append(Context&, const ops::KvAppendArgs&) { OCTET_ASSERT(false); }
void kv_copy(Context&, const ops::KvCopyArgs&) { OCTET_ASSERT(false); }
void attention(Context&, const ops::AttentionArgs&) { OCTET_ASSERT(false); }
void attention_backward(Context&, const ops::AttentionBackwardArgs&) { OCTET_ASSERT(false); }

}  // namespace octet::cpu
