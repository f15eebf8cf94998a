// What decoding walks over: chunks of single-token sequences, each with a few query rows.
#pragma once

#include "backend/cuda/attention.h"

namespace octet::cuda {

inline constexpr int kPageKeys = 16;

// A row of queries: a sequence and a query head; sequence −1: none.
struct QueryRow {
  int sequence, head;
};

// Rows of neighbouring sequences that share a chunk are taken some at a time, a set, by the
// sequence in which the set begins: the run's first set that begins in a member or behind it.
template <int kRows>
__device__ inline int first_set(const AttentionProblem& p, int member) {
  return (member * p.group + kRows - 1) / kRows;
}

// A chunk that a sequence has for itself is an item of its own.
template <int kRows>
struct ItemCounts {
  int sets, num_shared, own_first, own_end;  // sets of each shared chunk; own chunks
  __device__ ItemCounts(const AttentionProblem& p, int sequence) {
    const ChunkRange chunks = chunks_of(p, sequence);
    const int shared_chunks = chunks_shared(p, sequence);
    const int member = shared_chunks > 0 ? sequence - p.shared_first[sequence] : 0;
    sets = first_set<kRows>(p, member + 1) - first_set<kRows>(p, member);
    num_shared = shared_chunks * sets;
    own_first = max(chunks.begin, shared_chunks);
    own_end = max(chunks.end, own_first);
  }
  __device__ int total() const { return num_shared + own_end - own_first; }
};
template <class Walk, int kThreads>
__device__ void count_items(const AttentionProblem& p, int* first) {
  prefix_sums<kThreads>(
      p.num_sequences, [&](int s) { return typename Walk::Counts(p, s).total(); }, first);
}

// A walk over the items: a chunk and a key/value head of up to kRows query rows.
template <int kRows>
struct Walk {
  using Counts = ItemCounts<kRows>;

  int index, sequence, chunk, head;
  int begin, end, limit, first_key;  // keys
  int leader, first_row;  // shared: row r is head r % group of sequence leader + r / group
  bool shared;

  // To item `next`, at or behind the current one; false: there is none.
  __device__ bool to(const AttentionProblem& p, const int* first, int next, int lane) {
    index = next;
    const int flat = index / p.keys.heads;
    if (flat >= first[p.num_sequences]) return false;
    head = index - flat * p.keys.heads;
    sequence = find_sequence(first, p.num_sequences, flat, sequence, lane);
    const Counts counts(p, sequence);
    const int within = flat - first[sequence];
    shared = within < counts.num_shared;
    if (shared) {
      leader = p.shared_first[sequence];
      chunk = within / counts.sets;
      first_row = kRows * (first_set<kRows>(p, sequence - leader) + within - chunk * counts.sets);
      limit = (chunk + 1) * kChunkKeys;
      first_key = 0;
    } else {
      leader = sequence;
      chunk = counts.own_first + within - counts.num_shared;
      first_row = 0;
      limit = p.context_lengths[sequence];
      first_key = p.window > 0 ? max(0, limit - p.window) : 0;
    }
    begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
    end = min((chunk + 1) * kChunkKeys, limit);
    return true;
  }

  // The lane's page of the chunk.
  __device__ int pages(const AttentionProblem& p, int lane) const {
    const int table = chunk * (kChunkKeys / kPageKeys) + lane;
    const bool inside =
        lane < kChunkKeys / kPageKeys && table < p.keys.max_pages && table * kPageKeys < limit;
    const int page = inside ? p.keys.pages[sequence * p.table_stride + table] : -1;
    return page < p.keys.num_pages ? page : -1;
  }

  __device__ QueryRow row(const AttentionProblem& p, int column) const {
    const int r = first_row + column, member = r / p.group;
    const int s = leader + member, query = head * p.group + r - member * p.group;
    const bool valid =
        shared ? s < p.num_sequences && p.shared_first[s] == leader : column < p.group;
    return {valid ? s : -1, query};
  }
};

}  // namespace octet::cuda
