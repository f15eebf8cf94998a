// What the roles of a block of the prefill kernels share: their work items; and, of that over BF16
// pages, the shared memory.
//
// A tile of BF16 operands lies in shared memory as slabs of 64 columns, each a row of 128 bytes
// for each key or query, swizzled by 128 for the matrix unit. Keys and queries have their columns
// in the order of the class's contraction (attention_tile.cuh): which sixteen meet in a step is
// part of a row's bytes, their places within the step are not.
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/mbarrier.cuh"

namespace octet::cuda {

struct PrefillProblem : AttentionProblem {
  // ⌈2^32 / group⌉, for quotients of numbers below 2^27; group 1: 2^32 − 1, of numbers one larger.
  uint32_t group_inverse;
  int group_addend;

  int num_items;
  int* next_item;  // 0 at the start

  // Query row, in order of token, then head of the group, to token.
  __device__ int token_of(int row) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(row + group_addend), group_inverse));
  }
};

inline constexpr int64_t kMostPrefillRows = int64_t{1} << 27;  // fewer than this: for token_of
inline PrefillProblem prefill_problem(const AttentionProblem& p) {
  if (p.group == 1) return {p, ~uint32_t{0}, 1, 0, nullptr};
  return {p, static_cast<uint32_t>(divide_up(int64_t{1} << 32, p.group)), 0, 0, nullptr};
}

// A value that all lanes hold, so that the compiler knows it.
__device__ inline int uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

inline constexpr int kSlabBytes = kTileKeys * 128;  // also of a warpgroup's 64 queries

// 16-byte chunk `chunk` of row `row` of a slab.
__device__ inline int slab_chunk(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}
// Where in a slab the columns 4 g … 4 g + 3 of a BF16 key or query go (8 bytes).
__device__ inline int contraction_place(int row, int g) {
  const int step = g / 8 * 2 + g % 2, quarter = g % 8 / 2;
  return slab_chunk(row, 2 * step + quarter / 2) + quarter % 2 * 8;
}

// The pages of a chunk of keys: a lane knows one.
class PrefillPages {
  const KeySource* source_ = nullptr;
  const int32_t* table_ = nullptr;
  int limit_ = 0;
  int page_ = -1, next_page_ = -1, first_ = 0;  // −1: no such page

  __device__ int page_at(int position) const {
    const int index = (position >> source_->page_shift) + static_cast<int>(threadIdx.x % 32);
    if (index >= source_->max_pages || index << source_->page_shift >= limit_) return -1;
    const int page = table_[index];
    return page < source_->num_pages ? page : -1;
  }

 public:
  // The pages of a sequence below position `limit`, from that of `begin` on.
  __device__ PrefillPages(const PrefillProblem& p, int sequence, int begin, int limit)
      : source_(&p.keys), table_(p.keys.pages + sequence * p.table_stride), limit_(limit) {
    next_page_ = page_at(begin);
    enter(begin);
  }
  // Moves to the chunk of `begin`, its first position that is asked for: at most 16 pages, since a
  // page has 16 tokens or more.
  __device__ void enter(int begin) {
    first_ = begin >> source_->page_shift;
    page_ = next_page_;
    next_page_ = page_at((begin / kChunkKeys + 1) * kChunkKeys);
  }
  // By all lanes, each for a position of its own.
  __device__ int page_of(int position) const {
    return __shfl_sync(0xFFFFFFFFu, page_, (position >> source_->page_shift) - first_);
  }
  __device__ int offset_of(int position) const {
    return position & ((1 << source_->page_shift) - 1);
  }
};

// BF16 pages.
template <int kHeadWidth>
struct PrefillLayout {
  static constexpr int kWidth = kHeadWidth;
  static constexpr bool kWindowed = true;        // or not, as the problem says
  static constexpr int kConsumers = 3;           // warpgroups of a block; a fourth one produces
  static constexpr int kRows = 64 * kConsumers;  // query rows of an item: tokens × heads of a group
  static constexpr int kSlabs = kWidth / 64;
  static constexpr int kTileBytes = kSlabs * kSlabBytes;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kSlots = 4;  // of the ring: keys and values in turn
  static constexpr int kItemSlots = 8;

  static constexpr int kRing = 0;
  static constexpr int kQueries = kRing + kSlots * kTileBytes;
  static constexpr int kTotals = kQueries + kConsumers * kTileBytes;  // rows' results so far
  static constexpr int kFetched = kTotals;                // queries as they lie, between two items
  static constexpr int kFetchedStride = 16 * kWidth * 4;  // between warps
  static constexpr int kItems = kTotals + kRows * kWidth * 4;
  static constexpr int kFull = kItems + kItemSlots * 32;
  static constexpr int kEmpty = kFull + kSlots * 8;
  static constexpr int kItemFull = kEmpty + kSlots * 8;
  static constexpr int kBytes = kItemFull + kItemSlots * 8;
  static_assert(kBytes <= 227 * 1024);
};

// Query rows of one sequence and key/value head, in order of token, then head, that a block takes
// together.
struct PrefillItem {
  int sequence;  // −1: none is left
  int head, first_token, first_position;
  int first_row, last_row;  // among the sequence's new tokens × group
  int begin, limit;         // positions of the keys: from a tile's first, up to the last row's own

  __device__ int position_of(const PrefillProblem& p, int row) const {
    return first_position + p.token_of(row);
  }
  // The first key of the first tile that a row sees.
  __device__ int begin_of(const PrefillProblem& p, int row) const {
    if (p.window == 0) return 0;
    return max(0, position_of(p, row) + 1 - p.window) / kTileKeys * kTileKeys;
  }
};

// Hands the items out to blocks as they come free, the longest of a sequence, its last, first; in a
// block one warp asks, and all read the same.
template <class Layout>
class PrefillSchedule {
  const PrefillProblem& p_;
  char* shared_;
  int turn_ = 0, posted_ = 0;

 public:
  __device__ PrefillSchedule(const PrefillProblem& p, char* shared) : p_(p), shared_(shared) {}

  // Room for the items of all sequences: those of one begin never too close to the last one's.
  static int num_items(const PrefillProblem& p) {
    return (p.num_tokens * p.group / Layout::kRows + p.num_sequences) * p.keys.heads;
  }

  // The next item of the block.
  __device__ PrefillItem next() {
    barrier_wait(full(turn_ % Layout::kItemSlots), turn_ / Layout::kItemSlots % 2);
    ++turn_;
    return before(0);
  }
  // What `next` gave that many calls before its last one, none or one: so long the ring holds it.
  __device__ PrefillItem before(int calls) const {
    PrefillItem item = *at((turn_ - 1 - calls) % Layout::kItemSlots);
    item.begin = uniform(item.begin);
    item.limit = uniform(item.limit);
    item.first_row = uniform(item.first_row);
    item.last_row = uniform(item.last_row);
    return item;
  }
  // The role of a consumer.
  template <class Consumer>
  __device__ void consume(Consumer& consumer) {
    PrefillItem item = next();
    if (item.sequence >= 0) consumer.fetch(item);
    while (item.sequence >= 0) {
      consumer.run(item);
      const PrefillItem done = item;
      item = next();
      if (item.sequence >= 0) consumer.fetch(item);
      consumer.write(done);
    }
  }
  // Makes an item next, by one warp, once for each that it has taken. Nobody is kItemSlots behind
  // it: an item has two operands at least and the ring room for few.
  __device__ void post() {
    const int lane = threadIdx.x % 32;
    PrefillItem item;
    do {
      int ticket = 0;
      if (lane == 0) ticket = atomicAdd(p_.next_item, 1);
      item.sequence = -1;
      const int index = p_.num_items - 1 - uniform(ticket);
      if (index < 0) break;
      read(index, item);
    } while (item.last_row < item.first_row);
    const int slot = posted_++ % Layout::kItemSlots;
    if (lane == 0) {
      *at(slot) = item;
      barrier_arrive(full(slot));
    }
  }

 private:
  __device__ PrefillItem* at(int slot) const {
    return reinterpret_cast<PrefillItem*>(shared_ + Layout::kItems) + slot;
  }
  __device__ uint32_t full(int slot) const {
    return shared_address(shared_) + Layout::kItemFull + 8 * slot;
  }
  __device__ int first_item(int sequence) const {
    return p_.query_offsets[sequence] * p_.group / Layout::kRows + sequence;
  }
  __device__ void read(int index, PrefillItem& item) const {
    item.head = index % p_.keys.heads;
    const int block = index / p_.keys.heads;
    // The last sequence whose items begin at or before the block's: among `count` of them each lane
    // asks one, so that few reads follow each other.
    int sequence = 0;
    for (int count = p_.num_sequences; count > 1;) {
      const int step = (count + 31) / 32, at = static_cast<int>(threadIdx.x % 32) * step;
      const bool begins = at < count && first_item(sequence + at) <= block;
      const int passed = (__popc(__ballot_sync(0xFFFFFFFFu, begins)) - 1) * step;
      sequence += passed;
      count = min(step, count - passed);
    }
    item.sequence = sequence;
    item.first_token = p_.query_offsets[sequence];
    const int new_tokens = p_.query_offsets[sequence + 1] - item.first_token;
    item.first_position = p_.context_lengths[sequence] - new_tokens;
    item.first_row = (block - first_item(sequence)) * Layout::kRows;
    item.last_row = min(item.first_row + Layout::kRows, new_tokens * p_.group) - 1;
    if (p_.chunked && new_tokens == 1) item.last_row = -1;
    item.begin = item.begin_of(p_, item.first_row);
    item.limit = max(1, item.position_of(p_, item.last_row) + 1);  // so that there is a tile
  }
};

}  // namespace octet::cuda
