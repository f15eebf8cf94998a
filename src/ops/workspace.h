// What a backend must know to say how much memory its ops need beside their operands.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet::ops {

// A weight, or weights that one product takes together.
struct LinearShape {
  int64_t rows = 0, columns = 0;
};

// The largest extents that its ops will see.
struct WorkspaceShape {
  int64_t max_tokens = 0;     // of one forward
  int64_t max_sequences = 0;  // of one forward
  int64_t max_context = 0;    // positions of one sequence
  int64_t query_heads = 0, kv_heads = 0, head_dim = 0;
  std::vector<LinearShape> linears;
  LinearShape head;           // its rows are the vocabulary
  int64_t head_rows = 0;      // tokens whose logits exist at once
  bool fp8 = false;           // linears are FP8
  bool block_scales = false;  // with a scale per token and 128 columns
  bool training = false;      // backward ops too
};

// Memory of the backend's own, by what it is for.
struct Workspace {
  std::string label;
  int64_t num_bytes = 0;
};

}  // namespace octet::ops
