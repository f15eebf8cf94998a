#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void embedding(Context&, const ops::EmbeddingArgs&) { OCTET_ASSERT(false); }
void embedding_backward(Context&, const ops::EmbeddingBackwardArgs&) { OCTET_ASSERT(false); }
void add(Context&, const ops::AddArgs&) { OCTET_ASSERT(false); }
void gated_activation(Context&, const ops::GatedActivationArgs&) { OCTET_ASSERT(false); }
void gated_activation_backward(Context&, const ops::GatedActivationBackwardArgs&) {
  OCTET_ASSERT(false);
}

}  // namespace octet::cpu
