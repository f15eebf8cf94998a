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
constexpr int kQueryWarps = 3;
// Of a thread; 128 at the start.
constexpr int kBringerRegisters = 48, kConsumerRegisters = 208;

template <int kWidth>
struct SharedRoles {
  using Codes = SharedCodes<kWidth>;
  using Walk = octet::cuda::Walk<Codes::kRows, Chunks::kShared>;
  static constexpr int kSharedBytes =
      1024 + Codes::kBytes + (kMaxDecodeSequences + 1) * static_cast<int>(sizeof(int));

  Codes codes;
  const int* first;                                           // the sequences' first items
  uint32_t keys_full, keys_empty, values_full, values_empty;  // barriers

  template <class Body>
  __device__ void for_items(const AttentionProblem& p, const Body& body) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t parity = 0;
    Walk walk{};
    for (int index = static_cast<int>(blockIdx.x); walk.to(p, first, index, lane);
         index += static_cast<int>(gridDim.x)) {
      body(walk, parity);
      parity ^= 1;
    }
  }

  // A lane takes the codes or the scales of a block of 16 keys.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map) const {
    constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);
    const int lane = static_cast<int>(threadIdx.x) % 32, block = lane % Codes::kBlocks;
    for_items(p, [&](const Walk& walk, uint32_t parity) {
      const int position = walk.begin + block * kBlockKeys;
      const int table = position >> p.keys.page_shift;
      const int page =
          table < p.keys.max_pages ? p.keys.pages[walk.sequence * p.table_stride + table] : -1;
      const int row = ((page * p.keys.heads + walk.head) << p.keys.page_shift) +
                      (position & ((1 << p.keys.page_shift) - 1));
      constexpr int kBytes = kChunkKeys * (kWidth + 4);
      const uint32_t to = codes.base + block * Codes::kBlockBytes;
      const uint32_t scales_to = codes.base + block * (kBlockKeys * 4);
      barrier_wait(keys_empty, parity ^ 1);
      if (lane == 0) barrier_expect(keys_full, kBytes);
      __syncwarp();
      if (lane < Codes::kBlocks) {
        bulk_copy_box(to + Codes::kKeys, k_map, 0, row, keys_full);
      } else {
        bulk_copy(scales_to + Codes::kKeyScales, p.keys.k_scales + row, kBlockKeys * 4, keys_full);
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
    });
  }

  // A warp brings its share of the queries, eight elements a lane; at first a lane knows two rows.
  __device__ void bring_queries(const AttentionProblem& p, int warp) const {
    constexpr int kLanes = kWidth / 8, kAtOnce = 32 / kLanes;  // of a row; rows
    constexpr int kAhead = 4;                                  // that are loaded together
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane % kLanes;
    for_items(p, [&](const Walk& walk, uint32_t parity) {
      int64_t from[2], target[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const QueryRow row = walk.row(p, lane + 32 * i);
        from[i] = target[i] = -1;
        if (row.sequence < 0) continue;
        from[i] = p.query_offsets[row.sequence] * p.q_stride + int64_t{row.head} * kWidth;
        target[i] = chunk_index(p, row.sequence, row.head, walk.chunk);
      }
      barrier_wait(keys_empty, parity ^ 1);
      if (warp == 0) {
        auto* const targets = reinterpret_cast<int64_t*>(codes.shared + Codes::kTargets);
        targets[lane] = target[0];
        targets[lane + 32] = target[1];
      }
#pragma unroll 1
      for (int first = warp * kAtOnce; first < Codes::kRows;
           first += kAhead * kQueryWarps * kAtOnce) {
        const auto row_of = [&](int i) {
          return first + i * kQueryWarps * kAtOnce + lane / kLanes;
        };
        uint4 words[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = row_of(i);
          const int64_t low = __shfl_sync(0xFFFFFFFFu, from[0], row % 32);
          const int64_t high = __shfl_sync(0xFFFFFFFFu, from[1], row % 32);
          const int64_t at = row < 32 ? low : row < Codes::kRows ? high : -1;
          words[i] = make_uint4(0, 0, 0, 0);
          if (at >= 0) words[i] = *reinterpret_cast<const uint4*>(p.q + at + 8 * piece);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) codes.place_query(row_of(i), piece, words[i], p.factor);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(keys_full);
    });
  }

  __device__ void consume(const AttentionProblem& p) const {
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    const int num_items = first[p.num_sequences] * p.keys.heads;
    uint32_t parity = 0;
    for (int index = static_cast<int>(blockIdx.x); index < num_items;
         index += static_cast<int>(gridDim.x)) {
      barrier_wait(keys_full, parity);
      codes.attend(
          p.chunk_stats, p.chunk_values, [&] { release(keys_empty); },
          [&] { barrier_wait(values_full, parity); }, [&] { release(values_empty); });
      parity ^= 1;
    }
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
  count_items<typename R::Walk, kThreads>(p, first);
  const uint32_t barrier = shared_address(barriers);
  const R roles{{at, base}, first, barrier, barrier + 8, barrier + 16, barrier + 24};
  if (threadIdx.x == 0) {
    barrier_init(roles.keys_full, 1 + kQueryWarps);
    barrier_init(roles.values_full, 1);
    barrier_init(roles.keys_empty, 4);
    barrier_init(roles.values_empty, 4);
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    take_registers<kConsumerRegisters>();
    roles.consume(p);
  } else {
    give_registers<kBringerRegisters>();
    if (warp == 4) {
      roles.load(p, &k_map);
    } else {
      roles.bring_queries(p, warp - 5);
    }
  }
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
