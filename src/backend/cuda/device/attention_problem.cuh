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
  uint32_t group_inverse;  // ⌈2^32 / group⌉, for quotients of less than 2^27; group 1: 0
  bool chunked;  // sequences of one token go to the chunks' kernel
  float factor;  // softmax scale × log2 e

  // Query row, in order of token, then head of the group, to token.
  __device__ int token_of(int row) const {
    return group == 1 ? row : static_cast<int>(__umulhi(static_cast<uint32_t>(row), group_inverse));
  }
};

}  // namespace octet::cuda
