// What the kernels of the attention forward share. What fixes a row's bytes stands in
// device/attention_tile.cuh, and in device/attention_codes.cuh where attention_codes_serve; which
// kernel computes which tile or chunk does not.
#pragma once

#include <type_traits>

#include "backend/cuda/context.h"
#include "backend/cuda/device/attention_tile.cuh"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "ops/attention.h"

namespace octet::cuda {

struct AttentionProblem {
  const Bf16* q;
  int64_t q_stride;
  Bf16* out;  // null: only the quantised result is wanted
  int64_t out_stride;
  float* lse;  // or null
  int64_t lse_stride;
  KeySource keys;  // of page table row 0 and head 0
  int64_t table_stride;
  const int32_t* query_offsets;
  const int32_t* context_lengths;
  const int32_t* shared_first;  // or null: nothing is read once for several sequences
  const int32_t* shared_pages;
  int num_sequences, num_tokens, group, window;
  bool chunked;             // sequences of one token go by chunks and are folded
  PrefillQueue* prefilled;  // what attention_prefill says of its rows; null: it does not serve
  float factor;             // softmax scale × log2 e

  // Of chunk c of (sequence, query head): (maximum, sum) and the head's values, kWidth floats.
  float2* chunk_stats;
  float* chunk_values;
  int num_chunks;  // room for each sequence and head
};

struct QuantizedRows;  // device/row_quantizer.cuh

// Whether the class of device/attention_codes.cuh is that of these pages; for decode and prefill
// alike, whatever the batch.
bool attention_codes_serve(const Context& context, const AttentionProblem& p,
                           const ops::KvCacheView& cache);

// The chunks of the sequences with one new token. `decode` is Hopper's over BF16 pages (false: not
// served), `decode_codes` serves where attention_codes_serve; both also read shared chunks once.
void attention_chunks(Context& context, const AttentionProblem& p, bool fp8);
bool attention_decode(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache);
void attention_decode_codes(Context& context, const AttentionProblem& p,
                            const ops::KvCacheView& cache);
// The sequences that do not go by chunks, on Hopper: `prefill_codes` where attention_codes_serve,
// `prefill` over BF16 pages. Where that one serves, it sets p.prefilled: if a row has a NaN, which
// may be from a value that the row does not see, all are to be computed once more.
void attention_prefill(Context& context, AttentionProblem& p);
void attention_prefill_codes(Context& context, const AttentionProblem& p,
                             const ops::KvCacheView& cache);
// From chunks to rows of the result, and their codes where it can (then asked for).
bool attention_fold_quantizes(const AttentionProblem& p, const ops::QuantizedOutput& output);
void attention_fold(Context& context, const AttentionProblem& p, const QuantizedRows& quantized);

// Lets a kernel's blocks have this much shared memory; an Error where the device has less. True.
template <class Kernel>
bool allow_shared(Kernel kernel, int bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaErrorInvalidValue) {
    cudaGetLastError();
    fail("attention",
         "needs {} KiB of shared memory in a block for heads of this width, which this device does "
         "not have; use --device cpu",
         bytes / 1024);
  }
  check(status, "attention");
  return true;
}

// The width that kernels are made for: 64, 128 or 256.
inline int kernel_width(int width) { return width <= 64 ? 64 : width <= 128 ? 128 : 256; }
// Runs body(is FP8, kernel width) as compile-time constants.
template <class Body>
void with_kernel_types(bool fp8, int width, const Body& body) {
  const auto with_width = [&](auto kernel_fp8) {
    if (width <= 64) return body(kernel_fp8, std::integral_constant<int, 64>());
    if (width <= 128) return body(kernel_fp8, std::integral_constant<int, 128>());
    return body(kernel_fp8, std::integral_constant<int, 256>());
  };
  fp8 ? with_width(std::true_type()) : with_width(std::false_type());
}

#ifdef __CUDACC__

constexpr float kLn2 = 0.6931471805599453f;

// A row's result from its final state.
__device__ inline void write_lse(const AttentionProblem& p, int64_t token, int64_t head,
                                 float maximum, float sum) {
  if (p.lse != nullptr) p.lse[token * p.lse_stride + head] = (maximum + log2f(sum)) * kLn2;
}

__device__ inline KeySource keys_of(const AttentionProblem& p, int sequence, int head) {
  KeySource keys = p.keys;
  keys.pages += sequence * p.table_stride;
  keys.head = head;
  return keys;
}

__device__ inline int64_t chunk_index(const AttentionProblem& p, int sequence, int query_head,
                                      int chunk) {
  return (int64_t{sequence} * p.keys.heads * p.group + query_head) * p.num_chunks + chunk;
}

struct ChunkRange {
  int begin, end;
};
// The chunks of a sequence with one new token; of any other none.
__device__ inline ChunkRange chunks_of(const AttentionProblem& p, int sequence) {
  // All is read at once: nothing waits for another read.
  const int tokens = p.query_offsets[sequence + 1] - p.query_offsets[sequence];
  const int length = p.context_lengths[sequence];
  const int limit = tokens == 1 ? length : 0;
  const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
  return {first_key / kChunkKeys, (limit + kChunkKeys - 1) / kChunkKeys};
}
// Leading chunks that all sequences of its run have in common.
__device__ inline int chunks_shared(const AttentionProblem& p, int sequence) {
  if (p.shared_pages == nullptr) return 0;
  return (p.shared_pages[sequence] << p.keys.page_shift) / kChunkKeys;
}

// first[l][i] = Σ of counts[l] over j < i, as count(j, counts) gives them, for i = 0 … n and
// several lists l; by all threads of the block.
template <int kThreads, int kLists, class Count>
__device__ void prefix_sums(int n, const Count& count, int* const (&first)[kLists]) {
  __shared__ int totals[kLists][kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  int before[kLists] = {};
  for (int base = 0; base < n; base += kThreads) {
    const int num_warps = (min(kThreads, n - base) + 31) / 32;  // that count anything
    int sums[kLists] = {};
    if (base + thread < n) count(base + thread, sums);
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sums[l], offset);
        if (lane >= offset) sums[l] += other;
      }
      if (lane == 31) totals[l][warp] = sums[l];
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
      int all = 0;
      for (int w = 0; w < num_warps; ++w) {
        if (w < warp) sums[l] += totals[l][w];
        all += totals[l][w];
      }
      if (base + thread == 0) first[l][0] = 0;
      if (base + thread < n) first[l][base + thread + 1] = before[l] + sums[l];
      before[l] += all;
    }
    __syncthreads();
  }
}
template <int kThreads, class Count>
__device__ void prefix_sums(int n, const Count& count, int* first) {
  prefix_sums<kThreads, 1>(n, [&](int i, int(&counts)[1]) { counts[0] = max(0, count(i)); },
                           {first});
}

// The sequence with first[s] ≤ index < first[s + 1], at or after `sequence`; by a whole warp.
__device__ inline int find_sequence(const int* first, int n, int index, int sequence, int lane) {
  for (;;) {
    const int at = sequence + 1 + lane;
    const unsigned passed = __ballot_sync(0xFFFFFFFFu, at <= n && first[at] <= index);
    sequence += __popc(passed);
    if (passed != 0xFFFFFFFFu) return sequence;
  }
}

#endif

}  // namespace octet::cuda
