// Statistics of rows of logits, by segments.
#pragma once

#include "backend/cuda/context.h"
#include "backend/cuda/device/sampling.cuh"
#include "tensor/tensor.h"

namespace octet::cuda {

struct Segments {
  SegmentStats* stats;  // [rows, count], valid until the next take of kScratchSums
  int count;            // a function of num_known alone
};

// Queues the statistics of logits [C, V] F32 over the first `num_known` columns; `weighted` says
// whether that sum is wanted too. With rules, row c has the temperature of rules.rows[c].
Segments segment_stats(Context& context, const tensor::TensorView& logits, int64_t num_known,
                       float temperature, bool weighted);
Segments segment_stats(Context& context, const tensor::TensorView& logits, int64_t num_known,
                       const DrawRules& rules);

}  // namespace octet::cuda
