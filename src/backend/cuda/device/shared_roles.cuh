// Blocks of decoding over E4M3 pages that take whole chunks which neighbouring sequences share:
// each is read once for up to 64 query rows. A block has two workers, each a warpgroup, a warp that
// brings keys and values and one that brings the queries of the next rows.
#pragma once

#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_walk.cuh"
#include "backend/cuda/device/shared_codes.cuh"
#include "backend/cuda/launch.cuh"

namespace octet::cuda {

// Neighbouring chunks of a set of rows, for a key/value head.
struct SharedItem {
  int sequence, leader, head, first_row;
  int begin, end;  // chunks
};
// Shared chunks, each as often as there are sets of kRows rows and key/value heads: in the order of
// sequence, set, head, chunk.
template <int kRows>
struct SharedList {
  const int* first;  // of each sequence, [num_sequences + 1], counted for each key/value head

  __device__ static int count(const AttentionProblem& p, int sequence) {
    if (p.shared_pages == nullptr) return 0;
    const int whole = chunks_shared(p, sequence), member = sequence - p.shared_first[sequence];
    return whole * (first_set<kRows>(p, member + 1) - first_set<kRows>(p, member));
  }
  __device__ int size(const AttentionProblem& p) const {
    return first[p.num_sequences] * p.keys.heads;
  }
  // The item that begins at `index`, of up to `most` chunks; by a warp.
  __device__ SharedItem item(const AttentionProblem& p, int index, int most) const {
    SharedItem item;
    item.sequence = find_sequence(first, p.num_sequences, index / p.keys.heads, 0,
                                  static_cast<int>(threadIdx.x) % 32);
    item.leader = p.shared_first[item.sequence];
    const int whole = chunks_shared(p, item.sequence);
    const int within = index - first[item.sequence] * p.keys.heads, row = within / whole;
    const int set = row / p.keys.heads;
    item.head = row - set * p.keys.heads;
    item.first_row = kRows * (first_set<kRows>(p, item.sequence - item.leader) + set);
    item.begin = within - row * whole;
    item.end = min(item.begin + most, whole);
    return item;
  }
};

template <int kWidth>
struct SharedRoles {
  using Codes = SharedCodes<kWidth>;
  using List = SharedList<Codes::kRows>;
  static constexpr int kWorkers = 2;  // of a block
  static constexpr int kFirstLoader = 4 * kWorkers;
  static constexpr int kWorkerBytes = (Codes::kBytes + 1023) / 1024 * 1024;
  static constexpr int kBytes = kWorkers * kWorkerBytes;  // of shared memory
  static constexpr int kBarriers = 8;                     // of a worker
  // Of a thread; 80 at the start.
  static constexpr int kConsumerRegisters = 184, kLoaderRegisters = 40, kIdleRegisters = 24;

  Codes codes;  // of a worker
  List list;
  int worker, num_workers;  // this one, of all blocks
  uint32_t barriers;        // of the worker, 8 bytes each
  __device__ uint32_t keys_full() const { return barriers; }
  __device__ uint32_t values_full() const { return barriers + 8; }
  __device__ uint32_t keys_empty() const { return barriers + 16; }
  __device__ uint32_t values_empty() const { return barriers + 24; }
  __device__ uint32_t rows_full(uint32_t place) const { return barriers + 32 + 8 * place; }
  __device__ uint32_t rows_empty(uint32_t place) const { return barriers + 48 + 8 * place; }

  __device__ void init_barriers() const {
    barrier_init(keys_full(), 1);
    barrier_init(values_full(), 1);
    barrier_init(keys_empty(), 4);
    barrier_init(values_empty(), 4);
    for (uint32_t place = 0; place < 2; ++place) {
      barrier_init(rows_full(place), 1);
      barrier_init(rows_empty(place), 4);
    }
  }

  // Calls body(item) for the items of the worker, which has as many chunks as the others.
  template <class Body>
  __device__ void for_items(const AttentionProblem& p, const Body& body) const {
    const int size = list.size(p), each = size / num_workers, rest = size - each * num_workers;
    int index = worker * each + min(worker, rest);
    for (int left = each + (worker < rest ? 1 : 0); left > 0;) {
      const SharedItem item = list.item(p, index, left);
      body(item);
      index += item.end - item.begin;
      left -= item.end - item.begin;
    }
  }

  // A lane takes the codes or the scales of a block of 16 keys.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map) const {
    constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);
    constexpr int kBytes = kChunkKeys * (kWidth + 4);
    const int lane = static_cast<int>(threadIdx.x) % 32, block = lane % Codes::kBlocks;
    const uint32_t to = codes.base + block * Codes::kBlockBytes;
    const uint32_t scales_to = codes.base + block * (kBlockKeys * 4);
    uint32_t parity = 0;
    for_items(p, [&](const SharedItem& item) {
      for (int chunk = item.begin; chunk < item.end; ++chunk) {
        const int position = chunk * kChunkKeys + block * kBlockKeys;
        // Shared pages are all there; any other number would still read what exists.
        const int page =
            p.keys.pages[item.sequence * p.table_stride + (position >> p.keys.page_shift)];
        const int row = ((min(max(page, 0), p.keys.num_pages - 1) * p.keys.heads + item.head)
                         << p.keys.page_shift) +
                        (position & ((1 << p.keys.page_shift) - 1));
        await_predecessor();
        barrier_wait(keys_empty(), parity ^ 1);
        if (lane == 0) barrier_expect(keys_full(), kBytes);
        __syncwarp();
        if (lane < Codes::kBlocks) {
          bulk_copy_box(to + Codes::kKeys, k_map, 0, row, keys_full());
        } else {
          bulk_copy(scales_to + Codes::kKeyScales, p.keys.k_scales + row, kBlockKeys * 4,
                    keys_full());
        }
        barrier_wait(values_empty(), parity ^ 1);
        if (lane == 0) barrier_expect(values_full(), kBytes);
        __syncwarp();
        if (lane < Codes::kBlocks) {
          bulk_copy(to + Codes::kValues, p.keys.v + int64_t{row} * kWidth, Codes::kBlockBytes,
                    values_full());
        } else {
          bulk_copy(scales_to + Codes::kValueScales, p.keys.v_scales + row, kBlockKeys * 4,
                    values_full());
        }
        parity ^= 1;
      }
    });
  }

  // A warp finds the items and brings their rows' queries; a lane those of two rows.
  __device__ void bring_rows(const AttentionProblem& p) const {
    constexpr uint32_t kRowBytes = 2 * kWidth;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t count = 0;
    const auto bring = [&](const SharedItem& item) {
      const uint32_t place = count % 2;
      const Bf16* from[2];
      int64_t target[2] = {-1, -1};
      uint32_t num_rows = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = item.first_row + lane + 32 * i, sequence = item.leader + row / p.group;
        const int head = item.head * p.group + row % p.group;
        if (item.end > 0 && sequence < p.num_sequences && p.shared_first[sequence] == item.leader) {
          from[i] = p.q + p.query_offsets[sequence] * p.q_stride + int64_t{head} * kWidth;
          target[i] = chunk_index(p, sequence, head, 0);
        }
        num_rows += __popc(__ballot_sync(0xFFFFFFFFu, target[i] >= 0));
      }
      await_predecessor();
      barrier_wait(rows_empty(place), count / 2 % 2 ^ 1);
      auto& rows = codes.rows(static_cast<int>(place));
      rows.targets[lane] = target[0];
      rows.targets[lane + 32] = target[1];
      if (lane == 0) rows.begin = item.begin, rows.end = item.end;
      __syncwarp();
      if (lane == 0) barrier_expect(rows_full(place), num_rows * kRowBytes);
      __syncwarp();
      const uint32_t to = codes.base + Codes::kQueries + place * Codes::kQueryBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (target[i] < 0) continue;
        bulk_copy(to + (lane + 32 * i) * kRowBytes, from[i], kRowBytes, rows_full(place));
      }
      ++count;
    };
    for_items(p, bring);
    bring({});
  }

  // By a warpgroup, whose own barrier is `sync`.
  __device__ void consume(const AttentionProblem& p, int sync) const {
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    await_predecessor();
    uint32_t parity = 0;
    for (uint32_t count = 0;; ++count) {
      const int place = static_cast<int>(count % 2);
      barrier_wait(rows_full(place), count / 2 % 2);
      const int end = codes.rows(place).end;
      if (end == 0) return;
      codes.turn_queries(place, p.factor, sync);
      for (int chunk = codes.rows(place).begin; chunk < end; ++chunk) {
        barrier_wait(keys_full(), parity);
        codes.attend(
            place, chunk, p.chunk_stats, p.chunk_values, [&] { release(keys_empty()); },
            [&] { barrier_wait(values_full(), parity); }, [&] { release(values_empty()); });
        parity ^= 1;
      }
      release(rows_empty(place));
    }
  }
};

}  // namespace octet::cuda
