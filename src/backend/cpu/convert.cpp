#include "backend/cpu/ops.h"
#include "base/error.h"

namespace octet::cpu {

void convert(Context&, const tensor::TensorView&, const tensor::TensorView&) {
  OCTET_ASSERT(false);
}

}  // namespace octet::cpu
