// What the stages of decoding over E4M3 pages work on: items of one or several turns, each the
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
    const bool shares = p.shared_pages != nullptr;
    const int keys = shares ? p.shared_pages[sequence] << p.keys.page_shift : 0;
    const int member = shares ? sequence - p.shared_first[sequence] : 0;
    const bool cut = keys % kChunkKeys != 0;
    cut_chunk = keys / kChunkKeys;
    leads = cut && member % turns == 0;
    own_begin = max(chunks.begin, cut_chunk + (cut ? 1 : 0));
    own_end = max(chunks.end, own_begin);
  }
};

// For a block: the first items of each sequence in the lists of cut chunks and of own ones,
// [num_sequences + 1] each, counted for each key/value head.
struct TurnLists {
  const int* cut;
  const int* own;
  int turns;  // of an item, at most
};

// Turn of a stage: the query rows of a sequence against a chunk.
struct Turn {
  int sequence, chunk, head;
  int begin, end, first_key;  // keys; end 0: there is no turn, and none follows
  bool cut;
  __device__ bool empty() const { return end == 0; }
};

// A warp's walk over the turns of a stage, a worker. Its first items are given, and then it takes
// from the queue whichever comes next of all. Own items are bound by memory, cut ones by arithmetic
// and longer: these stand between those, in the first half.
class TurnWalk {
  const AttentionProblem& p_;
  const TurnLists lists_;
  int* const queue_;  // 0 before the first worker begins and after the last one ends
  const int num_workers_, num_cut_, num_items_;
  const int period_;                 // the last of so many items is a cut one
  const int num_given_;              // items that are not in the queue
  int claimed_;                      // of the queue; known to lane 0
  int cut_hint_ = 0, own_hint_ = 0;  // sequences of the last items
  int last_ = -1, leader_ = 0;       // sequences: of the item's last turn, of the run

  // A worker asks for an item two turns before that begins: so many would be taken at once by
  // whoever is first, and so unevenly among the multiprocessors.
  static constexpr int kGiven = 3;

 public:
  Turn turn{};

  __device__ TurnWalk(const AttentionProblem& p, const TurnLists& lists, int* queue, int worker,
                      int num_workers)
      : p_(p),
        lists_(lists),
        queue_(queue),
        num_workers_(num_workers),
        num_cut_(lists.cut[p.num_sequences] * p.keys.heads),
        num_items_(num_cut_ + lists.own[p.num_sequences] * p.keys.heads),
        period_(max(1, num_items_ / 2 / max(1, num_cut_))),
        num_given_(num_workers * (num_cut_ == 0 ? kGiven : 1)),
        claimed_(worker - num_given_) {}

  // To the next turn; false: there is none, and what follows is an empty one.
  __device__ bool next() {
    for (;;) {
      while (++turn.sequence <= last_) {
        if (place()) return true;
      }
      if (!next_item()) {
        turn = {};
        return false;
      }
    }
  }

 private:
  // To the next item, before its first turn.
  __device__ bool next_item() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int index = num_given_ + __shfl_sync(0xFFFFFFFFu, claimed_, 0);
    // Each worker gets one index behind the items; after the last of these nobody asks the queue.
    if (lane == 0 && index == num_items_ + num_workers_ - 1) *queue_ = 0;
    if (index >= num_items_) return false;
    if (lane == 0) {
      const bool given = index + num_workers_ < num_given_;
      claimed_ = given ? claimed_ + num_workers_ : atomicAdd(queue_, 1);
    }
    const int before = min(index / period_, num_cut_);
    turn.cut = before < num_cut_ && index % period_ == period_ - 1;
    const int* const list = turn.cut ? lists_.cut : lists_.own;
    const int in_list = turn.cut ? before : index - before;
    const int flat = in_list / p_.keys.heads;
    turn.head = in_list - flat * p_.keys.heads;
    const int sequence =
        find_sequence(list, p_.num_sequences, flat, turn.cut ? cut_hint_ : own_hint_, lane);
    const TurnItems items(p_, sequence, lists_.turns);
    if (turn.cut) {
      cut_hint_ = sequence;
      leader_ = p_.shared_first[sequence];
      turn.chunk = items.cut_chunk;
      last_ = min(sequence + lists_.turns, p_.num_sequences) - 1;
    } else {
      own_hint_ = sequence;
      turn.chunk = items.own_begin + flat - list[sequence];
      last_ = sequence;
    }
    turn.sequence = sequence - 1;
    return true;
  }

  // To the sequence's turn; false: it has none.
  __device__ bool place() {
    const int sequence = turn.sequence;
    if (turn.cut &&
        (p_.shared_first[sequence] != leader_ || turn.chunk >= chunks_of(p_, sequence).end)) {
      return false;
    }
    const int limit = p_.context_lengths[sequence];
    turn.first_key = p_.window > 0 ? max(0, limit - p_.window) : 0;
    turn.begin = max(turn.chunk * kChunkKeys, turn.first_key / kTileKeys * kTileKeys);
    turn.end = min((turn.chunk + 1) * kChunkKeys, limit);
    return true;
  }
};

}  // namespace octet::cuda
