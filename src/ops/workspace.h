// What a backend must know to say how much memory its ops need beside their operands.
#pragma once

#include <cstdint>

namespace octet::ops {

// The largest extents that its ops will see.
struct WorkspaceShape {
  int64_t max_tokens = 0;     // of one forward
  int64_t max_sequences = 0;  // of one forward
  int64_t max_context = 0;    // positions of one sequence
  int64_t query_heads = 0, kv_heads = 0, head_dim = 0;
  int64_t widest_input = 0;   // columns of a linear's weight
  int64_t widest_output = 0;  // rows of a group of weights
  int64_t hidden = 0;         // columns of the output head
  int64_t head_rows = 0;      // tokens whose logits exist at once
  int64_t vocab = 0;          // logits of a token
  bool fp8 = false;           // linears are FP8
  bool block_scales = false;  // with a scale per token and 128 columns
  bool training = false;      // backward ops too
};

}  // namespace octet::ops
