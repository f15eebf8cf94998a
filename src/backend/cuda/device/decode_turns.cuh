// What the stages of decoding over E4M3 pages walk over: items of one or several turns, each the
// query rows of a sequence against a chunk of a key/value head.
//
// A chunk that a sequence has for itself is an item of one turn. The chunk that begins with what a
// run of sequences has in common and ends with each one's own keys is an item with a turn for each
// of up to `turns` sequences: what the stage holds from the turn before is not brought again. The
// whole chunks in common are not among the items.
#pragma once

#include "backend/cuda/attention.h"

namespace octet::cuda {

// A sequence's items; a cut chunk counts for the sequence that has its first turn.
struct TurnItems {
  int cut_chunk;           // the chunk that begins with shared keys
  bool leads;              // has its first turn
  int own_begin, own_end;  // chunks

  __device__ TurnItems(const AttentionProblem& p, int sequence, int turns) {
    const ChunkRange chunks = chunks_of(p, sequence);
    const int keys = p.shared_pages == nullptr ? 0 : p.shared_pages[sequence] << p.keys.page_shift;
    const bool cut = keys % kChunkKeys != 0;
    cut_chunk = keys / kChunkKeys;
    leads = cut && (sequence - p.shared_first[sequence]) % turns == 0;
    own_begin = max(chunks.begin, cut_chunk + (cut ? 1 : 0));
    own_end = max(chunks.end, own_begin);
  }
};

// For a block: the first items of each sequence in the lists of cut chunks and of own ones,
// [num_sequences + 1] each, counted for each key/value head.
struct TurnLists {
  int* cut;
  int* own;
  int turns;  // of an item, at most

  // By all threads.
  template <int kThreads>
  __device__ void count(const AttentionProblem& p) const {
    if (p.shared_pages == nullptr) {
      if (threadIdx.x == 0) cut[p.num_sequences] = 0;
    } else {
      prefix_sums<kThreads>(
          p.num_sequences, [&](int s) { return TurnItems(p, s, turns).leads ? 1 : 0; }, cut);
    }
    prefix_sums<kThreads>(
        p.num_sequences,
        [&](int s) {
          const TurnItems items(p, s, turns);
          return items.own_end - items.own_begin;
        },
        own);
  }
};

// The turns of stage `stage` of kStages of a block. The stages of all blocks take the items of a
// list in turn. Own items are bound by memory, cut ones by arithmetic, so the stages of a block
// come to these at different times.
template <int kStages>
class TurnWalk {
  const AttentionProblem& p_;
  const TurnLists lists_;
  int next_cut_, next_own_, own_before_;  // items; own ones before the cut
  int cut_hint_ = 0, own_hint_ = 0;       // sequences of the last items
  int last_ = -1, leader_ = 0;            // sequences: of the item's last turn, of the run

 public:
  bool cut = false;
  int sequence = 0, chunk = 0, head = 0;
  int begin = 0, end = 0, first_key = 0;  // keys

  __device__ TurnWalk(const AttentionProblem& p, const TurnLists& lists, int stage)
      : p_(p), lists_(lists) {
    const int workers = kStages * static_cast<int>(gridDim.x);
    const int worker = static_cast<int>(blockIdx.x) + stage * static_cast<int>(gridDim.x);
    next_cut_ = worker;
    next_own_ = (worker + workers - num_items(lists.cut) % workers) % workers;
    const int own = (num_items(lists.own) - next_own_ + workers - 1) / workers;
    own_before_ = own * stage / kStages;
  }

  // To the next turn; false: there is none, and what follows is an empty one.
  __device__ bool next() {
    for (;;) {
      while (++sequence <= last_) {
        if (place()) return true;
      }
      if (!next_item()) {
        cut = false;
        sequence = chunk = begin = end = first_key = 0;
        return false;
      }
    }
  }
  __device__ bool empty() const { return end == 0; }

 private:
  __device__ int num_items(const int* list) const { return list[p_.num_sequences] * p_.keys.heads; }

  // To the next item, before its first turn.
  __device__ bool next_item() {
    const int workers = kStages * static_cast<int>(gridDim.x);
    cut = own_before_ <= 0 && next_cut_ < num_items(lists_.cut);
    const int* const list = cut ? lists_.cut : lists_.own;
    const int index = cut ? next_cut_ : next_own_;
    if (index >= num_items(list)) return false;
    const int flat = index / p_.keys.heads;
    head = index - flat * p_.keys.heads;
    const int first = find_sequence(list, p_.num_sequences, flat, cut ? cut_hint_ : own_hint_,
                                    static_cast<int>(threadIdx.x) % 32);
    const TurnItems items(p_, first, lists_.turns);
    if (cut) {
      next_cut_ += workers;
      cut_hint_ = first;
      leader_ = p_.shared_first[first];
      chunk = items.cut_chunk;
      last_ = min(first + lists_.turns, p_.num_sequences) - 1;
    } else {
      next_own_ += workers;
      own_hint_ = first;
      --own_before_;
      chunk = items.own_begin + flat - list[first];
      last_ = first;
    }
    sequence = first - 1;
    return true;
  }

  // To the sequence's turn; false: it has none.
  __device__ bool place() {
    if (cut && (p_.shared_first[sequence] != leader_ || chunk >= chunks_of(p_, sequence).end)) {
      return false;
    }
    const int limit = p_.context_lengths[sequence];
    first_key = p_.window > 0 ? max(0, limit - p_.window) : 0;
    begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
    end = min((chunk + 1) * kChunkKeys, limit);
    return true;
  }
};

}  // namespace octet::cuda
