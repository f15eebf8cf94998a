// What the kernels of the attention forward are told.
#pragma once

#include "backend/cuda/device/attention_tile.cuh"

namespace octet::cuda {

struct AttentionProblem {
  const Bf16* q;
  int64_t q_stride;
  Bf16* out;
  int64_t out_stride;
  float* lse;  // or null
  int64_t lse_stride;
  KeySource keys;  // of page table row 0 and head 0
  int64_t table_stride;
  const int32_t* query_offsets;
  const int32_t* context_lengths;
  int num_sequences, group, window;
  bool chunked;  // sequences of one token go to the chunks' kernel
  float factor;  // softmax scale × log2 e
};

}  // namespace octet::cuda
