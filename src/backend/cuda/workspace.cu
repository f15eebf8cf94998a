#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/cublaslt.h"
#include "backend/cuda/device/attention_tile.cuh"
#include "backend/cuda/device/row_stats.cuh"
#include "backend/cuda/workspace.h"
#include "ops/sampling.h"

namespace octet::cuda {

using tensor::kScaleBlock;

std::vector<ops::Workspace> workspaces(Context& context, const ops::WorkspaceShape& s) {
  int64_t input = 0, output = 0;
  for (const ops::LinearShape& linear : s.linears) {
    input = std::max(input, linear.columns);
    output = std::max(output, linear.rows);
  }
  const int64_t tokens = s.max_tokens, vocab = s.head.rows;
  int64_t slots[kNumScratchSlots] = {};
  const auto need = [&](ScratchSlot slot, int64_t num_bytes) {
    slots[slot] = std::max(slots[slot], num_bytes);
  };
  // Maximum, sum and values of every chunk of keys.
  const int64_t width = s.head_dim <= 64 ? 64 : s.head_dim <= 128 ? 128 : 256;
  need(kScratchAttention,
       4 * s.max_sequences * s.query_heads * divide_up(s.max_context, kChunkKeys) * (width + 2));
  need(kScratchSums, s.head_rows * divide_up(vocab, kSegmentColumns) *
                         static_cast<int64_t>(sizeof(SegmentStats)));
  need(kScratchLibrary, context.library().workspace_bytes(s));
  if (s.block_scales) need(kScratchScales2, 4 * tokens * divide_up(input, kScaleBlock));
  if (s.training) {
    // Transposed operands; groups of at most 128 tokens each padded to 128.
    const int64_t element = s.fp8 ? 1 : 2;
    const int64_t padded = s.fp8 ? tokens + kScaleBlock * s.max_sequences : tokens;
    need(kScratchWeights, element * input * std::max(output, padded));
    need(kScratchWeights, 2 * s.head.columns * std::max(vocab, s.head_rows));
    need(kScratchInputs, element * output * padded);
    need(kScratchInputs, 2 * vocab * s.head_rows);
    need(kScratchSums, 4 * tokens * input);
    need(kScratchAttention, 4 * tokens * (2 * s.kv_heads * s.head_dim + s.query_heads));
    if (s.fp8) {
      need(kScratchScales, 4 * std::max(input, output) * divide_up(padded, kScaleBlock));
      need(kScratchScales2, 4 * output * divide_up(padded, kScaleBlock));
    }
  }
  int64_t scratch = 0;
  for (const int64_t slot : slots) scratch += context.allocator().whole_pages(slot);
  return {{"workspaces", scratch}};
}

}  // namespace octet::cuda
