// How much scratch the ops take, so that it can be planned.
#pragma once

#include <cstdint>

#include "backend/cuda/context.h"
#include "ops/workspace.h"

namespace octet::cuda {

// Bytes of every scratch slot at these extents, each in whole pages, as the ops ask for them.
int64_t workspace_bytes(const Context& context, const ops::WorkspaceShape& shape);

}  // namespace octet::cuda
