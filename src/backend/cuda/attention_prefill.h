// The attention forward for many new tokens on Hopper's matrix unit.
#pragma once

#include <cstdint>

#include "backend/cuda/context.h"

namespace octet::cuda {

struct AttentionProblem;

// Whether the kernel below takes the problem: heads of 64 or 128, pages of 16 tokens or
// more, queries at multiples of 16 bytes.
bool prefill_takes(const AttentionProblem& problem);

// Queues the forward of all sequences but those that `problem.chunked` leaves to decoding;
// `num_tokens` is that of all new tokens. Rows equal the other kernels' byte for byte.
void launch_prefill(Context& context, const AttentionProblem& problem, bool fp8,
                    int64_t num_tokens);

}  // namespace octet::cuda
