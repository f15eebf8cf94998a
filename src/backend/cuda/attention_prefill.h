// The attention forward for many new tokens on Hopper's matrix unit.
#pragma once

#include <cstdint>

#include "backend/cuda/context.h"

namespace octet::cuda {

struct AttentionProblem;

// Whether the kernel below takes heads of this width.
inline bool prefill_takes(int64_t width) { return width == 64 || width == 128; }

// Queues the forward of all sequences but those that `problem.chunked` leaves to decoding;
// `num_tokens` is that of all new tokens. Rows equal the other kernels' byte for byte. q and out
// must lie at multiples of 16 bytes, rows too.
void launch_prefill(Context& context, const AttentionProblem& problem, bool fp8,
                    int64_t num_tokens);

}  // namespace octet::cuda
