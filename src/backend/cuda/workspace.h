// How much memory the ops take for themselves, so that it can be planned.
#pragma once

#include <vector>

#include "backend/cuda/context.h"
#include "ops/workspace.h"

namespace octet::cuda {

// The scratch slots at these extents, as the ops ask for them. In whole pages.
std::vector<ops::Workspace> workspaces(Context& context, const ops::WorkspaceShape& shape);

}  // namespace octet::cuda
