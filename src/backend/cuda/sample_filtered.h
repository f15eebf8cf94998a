// Drawing ids from rows with top_p, top_k or min_p.
#pragma once

#include "backend/cuda/context.h"
#include "backend/cuda/device/sampling.cuh"

namespace octet::cuda {

// Draws the first `num_rows` rows of `draw` that a filter limits, and leaves the others alone.
void draw_filtered(Context& context, const Draw& draw, const DrawRules& rules, int num_rows);

}  // namespace octet::cuda
