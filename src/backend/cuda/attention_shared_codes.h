// The launch of decoding over E4M3 pages for the chunks that sequences share.
#pragma once

#include <cuda.h>

#include "backend/cuda/attention.h"

namespace octet::cuda {

inline constexpr int kMaxDecodeSequences = 1024;  // of a launch

// Whole chunks of runs of sequences, for all their rows; `k_map` of the cache's keys.
void attention_shared_codes(Context& context, const AttentionProblem& p, const CUtensorMap& k_map);

}  // namespace octet::cuda
