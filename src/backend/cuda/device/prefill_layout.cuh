// What the roles of a block of the prefill kernel share: its work items, and its shared memory.
//
// A tile of 16-bit operands lies in shared memory as slabs of 64 columns, each a row of 128 bytes
// for each key or query, swizzled by 128 for the matrix unit. Keys and queries have their columns
// in the order of the class's contraction (attention_tile.cuh): which sixteen meet in a step is
// part of a row's bytes, their places within the step are not.
#pragma once

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/attention_problem.cuh"
#include "backend/cuda/device/mbarrier.cuh"

namespace octet::cuda {

inline constexpr int kSlabBytes = kTileKeys * 128;  // also of a warpgroup's 64 queries

// 16-byte chunk `chunk` of row `row` of a slab.
__device__ inline int slab_chunk(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}
// Where in a slab the columns 4 g … 4 g + 3 of a key or query go (8 bytes).
template <bool kFp8>
__device__ inline int contraction_place(int row, int g) {
  const int step = kFp8 ? g % 4 : g / 8 * 2 + g % 2;
  const int quarter = kFp8 ? g / 4 : g % 8 / 2;
  return slab_chunk(row, 2 * step + quarter / 2) + quarter % 2 * 8;
}

template <bool kFp8, int kWidth, int kConsumers>
struct PrefillLayout {
  static constexpr int kRows = 64 * kConsumers;  // query rows of an item: tokens × heads of a group
  static constexpr int kSlabs = kWidth / 64;
  static constexpr int kTileBytes = kSlabs * kSlabBytes;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kSlots = kConsumers == 3 ? 4 : 6;  // of the ring: keys and values in turn

  static constexpr int kRing = 0;
  static constexpr int kQueries = kRing + kSlots * kTileBytes;
  static constexpr int kTotals = kQueries + kConsumers * kTileBytes;  // rows' results so far
  static constexpr int kScales = kTotals + kRows * kWidth * 4;        // of a slot's 64 keys
  static constexpr int kFactors = kScales + (kFp8 ? kSlots * kTileKeys * 4 : 0);
  static constexpr int kFull = kFactors + kRows * 4;
  static constexpr int kEmpty = kFull + kSlots * 8;
  static constexpr int kBytes = kEmpty + kSlots * 8;

  // Where the items of a sequence begin among all: never too close together.
  __device__ static int first_item(const AttentionProblem& p, int sequence) {
    return static_cast<int>(int64_t{p.query_offsets[sequence]} * p.group / kRows) + sequence;
  }
};

// Up to kRows query rows of one sequence and key/value head, in order of token, then head.
template <class Layout>
struct PrefillItem {
  int sequence, head, first_token, first_position;
  int first_row, last_row;  // among the sequence's new tokens × group
  bool empty;
  int begin, limit;  // positions of the keys: from a tile's first, up to the last row's own

  __device__ PrefillItem(const AttentionProblem& p, int index) {
    head = index % p.keys.heads;
    index /= p.keys.heads;
    sequence = 0;
    for (int above = p.num_sequences; above - sequence > 1;) {
      const int middle = (sequence + above) / 2;
      (Layout::first_item(p, middle) <= index ? sequence : above) = middle;
    }
    first_token = p.query_offsets[sequence];
    const int new_tokens = p.query_offsets[sequence + 1] - first_token;
    first_position = p.context_lengths[sequence] - new_tokens;
    first_row = (index - Layout::first_item(p, sequence)) * Layout::kRows;
    last_row = min(first_row + Layout::kRows, new_tokens * p.group) - 1;
    empty = last_row < first_row || (p.chunked && new_tokens == 1);
    begin = begin_of(p, first_row);
    limit = position_of(p, last_row) + 1;
  }
  __device__ int position_of(const AttentionProblem& p, int row) const {
    return first_position + row / p.group;
  }
  // The first key of the first tile that a row sees.
  __device__ int begin_of(const AttentionProblem& p, int row) const {
    if (p.window == 0) return 0;
    return max(0, position_of(p, row) + 1 - p.window) / kTileKeys * kTileKeys;
  }
};

}  // namespace octet::cuda
