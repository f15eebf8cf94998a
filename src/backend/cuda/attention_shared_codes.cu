// Decoding over E4M3 pages on Hopper, of the chunks that neighbouring sequences share: each is read
// once for up to 64 query rows. Of a block's two warpgroups one brings keys, values and queries,
// the other one takes them; two blocks of a multiprocessor work beside each other.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/attention_shared_codes.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_walk.cuh"
#include "backend/cuda/device/shared_codes.cuh"
#include "backend/cuda/launch.cuh"

namespace octet::cuda {
namespace {

constexpr int kBlocksEach = 2;  // of a multiprocessor
constexpr int kThreads = 256;
// Of a thread; 128 at the start.
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 216;

// Chunks of a run's rows for a key/value head: as many as give all blocks the same.
struct SharedItem {
  int sequence, leader, head, first_row;
  int begin, end;  // chunks
};
struct SharedItems {
  int* first;  // [num_sequences + 1], counted for each key/value head
  int length;  // chunks of an item, at most

  // By all threads of the block.
  template <int kRows>
  __device__ static SharedItems of(const AttentionProblem& p, int* first) {
    SharedItems items{first, 1};
    prefix_sums<kThreads>(
        p.num_sequences, [&](int s) { return items.count<kRows>(p, s); }, first);
    const int num_chunks = first[p.num_sequences] * p.keys.heads;
    items.length =
        max(1, (num_chunks + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
    __syncthreads();
    prefix_sums<kThreads>(
        p.num_sequences, [&](int s) { return items.count<kRows>(p, s); }, first);
    return items;
  }
  __device__ int num_items(const AttentionProblem& p) const {
    return first[p.num_sequences] * p.keys.heads;
  }
  // By a warp.
  template <int kRows>
  __device__ SharedItem item(const AttentionProblem& p, int index) const {
    const int flat = index / p.keys.heads;
    SharedItem item;
    item.head = index - flat * p.keys.heads;
    item.sequence =
        find_sequence(first, p.num_sequences, flat, 0, static_cast<int>(threadIdx.x) % 32);
    item.leader = p.shared_first[item.sequence];
    const int whole = chunks_shared(p, item.sequence), parts = (whole + length - 1) / length;
    const int within = flat - first[item.sequence], set = within / parts;
    item.first_row = kRows * (first_set<kRows>(p, item.sequence - item.leader) + set);
    item.begin = (within - set * parts) * length;
    item.end = min(item.begin + length, whole);
    return item;
  }

 private:
  template <int kRows>
  __device__ int count(const AttentionProblem& p, int sequence) const {
    const int whole = chunks_shared(p, sequence);
    if (whole == 0) return 0;
    const int member = sequence - p.shared_first[sequence];
    const int sets = first_set<kRows>(p, member + 1) - first_set<kRows>(p, member);
    return sets * ((whole + length - 1) / length);
  }
};

template <int kWidth>
struct SharedRoles {
  using Codes = SharedCodes<kWidth>;
  static constexpr int kSharedBytes =
      1024 + Codes::kBytes + (kMaxDecodeSequences + 1) * static_cast<int>(sizeof(int));

  Codes codes;
  SharedItems items;
  uint32_t keys_full, keys_empty, values_full, values_empty;  // barriers

  // Calls body(item) for the items of the block.
  template <class Body>
  __device__ void for_items(const AttentionProblem& p, const Body& body) const {
    const int num_items = items.num_items(p);
    for (int index = static_cast<int>(blockIdx.x); index < num_items;
         index += static_cast<int>(gridDim.x)) {
      body(items.template item<Codes::kRows>(p, index));
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
        barrier_wait(keys_empty, parity ^ 1);
        if (lane == 0) barrier_expect(keys_full, kBytes);
        __syncwarp();
        if (lane < Codes::kBlocks) {
          bulk_copy_box(to + Codes::kKeys, k_map, 0, row, keys_full);
        } else {
          bulk_copy(scales_to + Codes::kKeyScales, p.keys.k_scales + row, kBlockKeys * 4,
                    keys_full);
        }
        barrier_wait(values_empty, parity ^ 1);
        if (lane == 0) barrier_expect(values_full, kBytes);
        __syncwarp();
        if (lane < Codes::kBlocks) {
          bulk_copy(to + Codes::kValues, p.keys.v + int64_t{row} * kWidth, Codes::kBlockBytes,
                    values_full);
        } else {
          bulk_copy(scales_to + Codes::kValueScales, p.keys.v_scales + row, kBlockKeys * 4,
                    values_full);
        }
        parity ^= 1;
      }
    });
  }

  __device__ void consume(const AttentionProblem& p) const {
    const int thread = static_cast<int>(threadIdx.x);
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(barrier);
    };
    uint32_t parity = 0;
    for_items(p, [&](const SharedItem& item) {
      warpgroup_sync(1);  // the last item's rows are no longer used
      if (thread < Codes::kRows) {
        const int row = item.first_row + thread, sequence = item.leader + row / p.group;
        const int head = item.head * p.group + row % p.group;
        int64_t from = -1, target = -1;
        if (sequence < p.num_sequences && p.shared_first[sequence] == item.leader) {
          from = p.query_offsets[sequence] * p.q_stride + int64_t{head} * kWidth;
          target = chunk_index(p, sequence, head, 0);
        }
        reinterpret_cast<int64_t*>(codes.shared + Codes::kFrom)[thread] = from;
        reinterpret_cast<int64_t*>(codes.shared + Codes::kTargets)[thread] = target;
      }
      await_predecessor();
      warpgroup_sync(1);
      codes.place_queries(p.q, p.factor);
      fence_async_proxy();
      warpgroup_sync(1);
      for (int chunk = item.begin; chunk < item.end; ++chunk) {
        barrier_wait(keys_full, parity);
        codes.attend(
            chunk, p.chunk_stats, p.chunk_values, [&] { release(keys_empty); },
            [&] { barrier_wait(values_full, parity); }, [&] { release(values_empty); });
        parity ^= 1;
      }
    });
  }
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    shared_kernel(const __grid_constant__ AttentionProblem p,
                  const __grid_constant__ CUtensorMap k_map) {
  using R = SharedRoles<kWidth>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[4];
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const at = shared + (base - unaligned);
  int* const first = reinterpret_cast<int*>(at + R::Codes::kBytes);
  const SharedItems items = SharedItems::of<R::Codes::kRows>(p, first);
  const uint32_t barrier = shared_address(barriers);
  const R roles{{at, base}, items, barrier, barrier + 8, barrier + 16, barrier + 24};
  if (threadIdx.x == 0) {
    barrier_init(roles.keys_full, 1);
    barrier_init(roles.values_full, 1);
    barrier_init(roles.keys_empty, 4);
    barrier_init(roles.values_empty, 4);
    barrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    take_registers<kConsumerRegisters>();
    roles.consume(p);
  } else {
    give_registers<kLoaderRegisters>();
    if (warp == 4) roles.load(p, &k_map);
  }
  await_predecessor();  // so that what follows this one follows both
}

template <int kWidth>
void launch_width(Context& context, const AttentionProblem& p, const CUtensorMap& k_map) {
  using R = SharedRoles<kWidth>;
  const auto kernel = shared_kernel<kWidth>;
  static const bool ready = allow_shared(kernel, R::kSharedBytes);
  (void)ready;
  const int64_t most = int64_t{p.num_sequences} * p.num_chunks * p.keys.heads;
  const int64_t blocks = std::min<int64_t>(most, kBlocksEach * context.num_multiprocessors());
  launch("attention", context,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .num_threads = kThreads,
          .shared_bytes = R::kSharedBytes},
         kernel, p, k_map);
}

}  // namespace

void attention_shared_codes(Context& context, const AttentionProblem& p, const CUtensorMap& k_map) {
  p.keys.width == 128 ? launch_width<128>(context, p, k_map) : launch_width<64>(context, p, k_map);
}

}  // namespace octet::cuda
