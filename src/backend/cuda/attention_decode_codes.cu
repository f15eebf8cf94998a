// Decoding over E4M3 pages on Hopper: blocks walk chunks of single-token sequences, a few at once.
// Each of these has a stage of shared memory, which warps of its own fill (the tensor memory
// accelerator brings keys and values) and a warpgroup works on. Some blocks take the whole chunks
// that sequences share instead (device/shared_roles.cuh): bound by arithmetic, beside the others,
// which memory bounds.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_codes.cuh"
#include "backend/cuda/device/decode_turns.cuh"
#include "backend/cuda/device/shared_roles.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/status.h"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

constexpr int kMaxSequences = 1024;  // of a launch
constexpr int kMaxTurns = 6;         // of an item
constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);

template <int kWidth, int kRows>
struct Roles {
  // A stage has a warpgroup, loaders (it takes a warp long to ask for one copy) and a query warp;
  // the block's warps are ordered by role, then stage.
  static constexpr int kStages = 3, kLoaders = 2;
  static constexpr int kFirstLoader = 4 * kStages;
  static constexpr int kFirstQueryWarp = kFirstLoader + kStages * kLoaders;
  static constexpr int kThreads = 2 * 128 * kStages;  // whole warpgroups; some warps do nothing
  // Of a thread; 80 at the start.
  static constexpr int kHelperRegisters = 56, kConsumerRegisters = 104;
  using Codes = DecodeCodes<kWidth, kRows>;
  static constexpr int kBytes = kStages * Codes::kStageBytes;  // of shared memory
  static constexpr int kBarriers = 6;                          // of a stage

  // A stage, and its address in shared memory.
  char* stage;
  uint32_t address;
  Turn* turns;        // this one and the next one
  uint32_t barriers;  // 8 bytes each

  // Keys, queries and scales have come; values have; keys may be overwritten; all else may; the
  // turn is known.
  __device__ uint32_t keys_full() const { return barriers; }
  __device__ uint32_t values_full() const { return barriers + 8; }
  __device__ uint32_t keys_empty() const { return barriers + 16; }
  __device__ uint32_t values_empty() const { return barriers + 24; }
  __device__ uint32_t turn_known(uint32_t parity) const { return barriers + 32 + 8 * parity; }

  __device__ void init_barriers() const {
    barrier_init(keys_full(), 2 * kLoaders + 1);
    barrier_init(values_full(), kLoaders);
    barrier_init(keys_empty(), 4);
    barrier_init(values_empty(), 4);
    barrier_init(turn_known(0), 1);
    barrier_init(turn_known(1), 1);
  }

  // A warp asks for its share of the keys and values of the turns, and brings their scales.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map, int loader) const {
    constexpr int kBlocks = Codes::kBlocks, kShare = kBlocks / kLoaders;
    static_assert(4 * kShare == 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t own = ((1u << kShare) - 1) << loader * kShare;
    int held = -1;  // the row of the lane's block that the stage holds as it is in the cache
    for (uint32_t count = 0, more = 1; more != 0; ++count) {
      const uint32_t parity = count % 2;
      barrier_wait(turn_known(parity), count / 2 % 2);
      const Turn turn = turns[parity];
      more = turn.empty() ? 0 : 1;
      // A lane finds the row in the cache with which a block begins.
      const int chunk_begin = turn.chunk * kChunkKeys;
      const int position = chunk_begin + lane % kBlocks * kBlockKeys;
      const int table = position >> p.keys.page_shift;
      const bool inside = position >= turn.begin && position < turn.end && table < p.keys.max_pages;
      const int page = inside ? p.keys.pages[turn.sequence * p.table_stride + table] : -1;
      const bool here = page >= 0 && page < p.keys.num_pages;
      const int row = ((page * p.keys.heads + turn.head) << p.keys.page_shift) +
                      (position & ((1 << p.keys.page_shift) - 1));
      const uint32_t blocks = __ballot_sync(0xFFFFFFFFu, here) & ((1u << kBlocks) - 1);
      const uint32_t values = own & blocks & ~__ballot_sync(0xFFFFFFFFu, row == held);
      const uint32_t keys = values | (own & blocks & Codes::kKeysLost);
      held = here && position + kBlockKeys <= turn.end ? row : -1;
      await_predecessor();
      // Of the scales a lane takes four keys'.
      const int scales = loader * (32 * 4) + lane * 4;  // of the chunk's
      const int scales_row = __shfl_sync(0xFFFFFFFFu, row, scales / kBlockKeys) + lane % 4 * 4;
      const bool has_scales = (blocks >> scales / kBlockKeys & 1u) != 0;
      float4 k_scales, v_scales;
      if (has_scales) {
        k_scales = *reinterpret_cast<const float4*>(p.keys.k_scales + scales_row);
        v_scales = *reinterpret_cast<const float4*>(p.keys.v_scales + scales_row);
      }
      const uint64_t policy = turn.cut ? read_again() : read_once();
      const int block = loader * kShare + lane % kShare;
      const int from = __shfl_sync(0xFFFFFFFFu, row, block);
      barrier_wait(keys_empty(), parity ^ 1);
      if (lane == 0) barrier_expect(keys_full(), __popc(keys) * Codes::kBlockBytes);
      __syncwarp();
      if (lane < kShare && (keys >> block & 1u) != 0) {
        bulk_copy_box(address + Codes::kKeys + block * Codes::kBlockBytes, k_map, 0, from,
                      keys_full(), policy);
      }
      barrier_wait(values_empty(), parity ^ 1);
      if (lane == 0) {
        if (loader == 0) {
          *reinterpret_cast<CodesChunk*>(stage + Codes::kChunk) = {
              max(turn.first_key - chunk_begin, 0), turn.end - chunk_begin, blocks};
        }
        barrier_expect(values_full(), __popc(values) * Codes::kBlockBytes);
      }
      __syncwarp();
      if (lane < kShare && (values >> block & 1u) != 0) {
        bulk_copy(address + Codes::kValues + block * Codes::kBlockBytes,
                  p.keys.v + int64_t{from} * kWidth, Codes::kBlockBytes, values_full(), policy);
      }
      if (has_scales) {
        *reinterpret_cast<float4*>(stage + Codes::kKeyScales + scales * 4) = k_scales;
        *reinterpret_cast<float4*>(stage + Codes::kValueScales + scales * 4) = v_scales;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(keys_full());
    }
  }

  // A warp finds the turns and brings their queries, as two terms each; a lane takes 16 elements of
  // a row.
  __device__ void bring_queries(const AttentionProblem& p, TurnWalk walk) const {
    constexpr int kAtOnce = 512 / kWidth, kPasses = kRows / kAtOnce;  // rows
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane / kAtOnce;
    const auto row_of = [&](int pass) { return pass * kAtOnce + lane % kAtOnce; };
    for (uint32_t count = 0, more = 1; more != 0; ++count) {
      const uint32_t parity = count % 2;
      more = walk.next() ? 1 : 0;
      const Turn turn = walk.turn;
      // The turn before the last one has been read: it has ended.
      if (lane == 0) {
        turns[parity] = turn;
        barrier_arrive(turn_known(parity));
      }
      const int query_head = turn.head * p.group;
      const Bf16* const from = p.q + p.query_offsets[turn.sequence] * p.q_stride +
                               int64_t{query_head} * kWidth + 16 * piece;
      await_predecessor();
      Query queries[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        uint4 words[2] = {};
        if (row_of(pass) < p.group && !turn.empty()) {
          const auto* row = reinterpret_cast<const uint4*>(from + row_of(pass) * kWidth);
          words[0] = row[0];
          words[1] = row[1];
        }
        queries[pass] = query_of(words);
      }
      barrier_wait(values_empty(), parity ^ 1);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row_of(pass), at = Codes::query_at(row, piece);
        char* const to = stage;
        *reinterpret_cast<uint4*>(to + Codes::kLowQueries + at) = queries[pass].low;
        *reinterpret_cast<uint4*>(to + Codes::kHighQueries + at) = queries[pass].high;
        if (piece != 0) continue;
        reinterpret_cast<float*>(to + Codes::kFactors)[row] =
            p.factor * power_of_two(-queries[pass].power);
        reinterpret_cast<int64_t*>(to + Codes::kTargets)[row] =
            row < p.group ? chunk_index(p, turn.sequence, query_head + row, turn.chunk) : -1;
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(keys_full());
    }
  }

  // 16 elements of a row's query as terms; the other ones are with lanes of the same row.
  struct Query {
    uint4 high, low;
    int power;
  };
  __device__ static Query query_of(const uint4 (&words)[2]) {
    const uint32_t pairs[2][4] = {{words[0].x, words[0].y, words[0].z, words[0].w},
                                  {words[1].x, words[1].y, words[1].z, words[1].w}};
    float amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = pairs[i / 4][i % 4];
      amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(pair << 16)),
                               fabsf(__uint_as_float(pair & 0xFFFF0000u))));
    }
#pragma unroll
    for (int offset = 512 / kWidth; offset < 32; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    }
    const int power = query_power(amax);
    const QueryTerms a = query_terms(pairs[0], power_of_two(power));
    const QueryTerms b = query_terms(pairs[1], power_of_two(power));
    return {make_uint4(a.high[0], a.high[1], b.high[0], b.high[1]),
            make_uint4(a.low[0], a.low[1], b.low[0], b.low[1]), power};
  }

  // A warpgroup, whose own barrier is `sync`, takes the turns.
  __device__ void consume(const AttentionProblem& p, int sync) const {
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    await_predecessor();
    for (uint32_t parity = 0;; parity ^= 1) {
      barrier_wait(keys_full(), parity);
      const int end = reinterpret_cast<const CodesChunk*>(stage + Codes::kChunk)->end;
      if (end == 0) return;
      const auto attend = [&](auto tiles) {
        Codes::template attend<decltype(tiles)::value>(
            stage, address, p.chunk_stats, p.chunk_values, sync, [&] { release(keys_empty()); },
            [&] { barrier_wait(values_full(), parity); }, [&] { release(values_empty()); });
      };
      switch ((end + kTileKeys - 1) / kTileKeys) {
        case 1:
          attend(std::integral_constant<int, 1>());
          break;
        case 2:
          attend(std::integral_constant<int, 2>());
          break;
        case 3:
          attend(std::integral_constant<int, 3>());
          break;
        default:
          attend(std::integral_constant<int, 4>());
          break;
      }
    }
  }
};

// Of a launch's blocks those that take whole shared chunks: as large a part as these have in the
// work, by what each costs a multiprocessor, and rather too many, since memory bounds the others.
__device__ int blocks_for_shared(int num_shared, int num_own, int num_cut_turns) {
  constexpr float kShared = 8, kOwn = 2, kCutTurn = 1;
  if (num_shared == 0) return 0;
  const auto blocks = static_cast<int>(gridDim.x);
  const float shared = kShared * static_cast<float>(num_shared);
  const float others =
      kOwn * static_cast<float>(num_own) + kCutTurn * static_cast<float>(num_cut_turns);
  const float share = static_cast<float>(blocks) * (shared / (shared + others));
  return others == 0 ? blocks : min(static_cast<int>(ceilf(share)), blocks - 1);
}

// `turns`: of an item, at most; `queue`: TurnWalk's.
template <int kWidth, int kRows>
__global__ void __launch_bounds__(Roles<kWidth, kRows>::kThreads, 1)
    codes_kernel(const __grid_constant__ AttentionProblem p,
                 const __grid_constant__ CUtensorMap k_map, const int turns, int* const queue) {
  using R = Roles<kWidth, kRows>;
  using Shared = SharedRoles<kWidth>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[R::kBarriers * R::kStages];
  __shared__ Turn known_turns[R::kStages][2];
  static_assert(Shared::kWorkers * Shared::kBarriers <= R::kBarriers * R::kStages &&
                Shared::kBytes <= R::kBytes);
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const stages = shared + (base - unaligned);
  int* const cut = reinterpret_cast<int*>(stages + R::kBytes);
  int* const own = cut + kMaxSequences + 1;
  int* const whole = own + kMaxSequences + 1;
  prefix_sums<R::kThreads, 3>(p.num_sequences,
                              [&](int s, int(&counts)[3]) {
                                const TurnItems items(p, s, turns);
                                counts[0] = items.leads ? 1 : 0;
                                counts[1] = items.own_end - items.own_begin;
                                counts[2] = Shared::List::count(p, s);
                              },
                              {cut, own, whole});
  const int num_shared_blocks =
      blocks_for_shared(whole[p.num_sequences] * p.keys.heads, own[p.num_sequences] * p.keys.heads,
                        cut[p.num_sequences] * p.keys.heads * turns);
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const uint32_t barriers_base = shared_address(barriers);
  const auto init_barriers = [&](int count, const auto& roles) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < count; ++i) roles(i).init_barriers();
      barrier_fence_init();
    }
    __syncthreads();
  };
  if (static_cast<int>(blockIdx.x) < num_shared_blocks) {
    const auto roles = [&](int index) {
      const int bytes = index * Shared::kWorkerBytes;
      return Shared{{stages + bytes, base + static_cast<uint32_t>(bytes)},
                    {whole},
                    static_cast<int>(blockIdx.x) + index * num_shared_blocks,
                    Shared::kWorkers * num_shared_blocks,
                    barriers_base + static_cast<uint32_t>(8 * Shared::kBarriers * index)};
    };
    init_barriers(Shared::kWorkers, roles);
    if (warp < Shared::kFirstLoader) {
      take_registers<Shared::kConsumerRegisters>();
      roles(warp / 4).consume(p, 1 + warp / 4);
    } else if (warp < Shared::kFirstLoader + 4) {
      give_registers<Shared::kLoaderRegisters>();
      const int helper = warp - Shared::kFirstLoader, worker = helper % Shared::kWorkers;
      helper < Shared::kWorkers ? roles(worker).load(p, &k_map) : roles(worker).bring_rows(p);
    } else {
      give_registers<Shared::kIdleRegisters>();
    }
    return;
  }
  const auto roles = [&](int slot) {
    return R{stages + slot * R::Codes::kStageBytes,
             base + static_cast<uint32_t>(slot * R::Codes::kStageBytes), known_turns[slot],
             barriers_base + static_cast<uint32_t>(8 * R::kBarriers * slot)};
  };
  init_barriers(R::kStages, roles);
  if (warp < R::kFirstLoader) {
    take_registers<R::kConsumerRegisters>();
    roles(warp / 4).consume(p, 1 + warp / 4);
  } else {
    give_registers<R::kHelperRegisters>();
    const int loader = warp - R::kFirstLoader, query_warp = warp - R::kFirstQueryWarp;
    if (query_warp < 0) {
      roles(loader / R::kLoaders).load(p, &k_map, loader % R::kLoaders);
    } else if (query_warp < R::kStages) {
      const int blocks = static_cast<int>(gridDim.x) - num_shared_blocks;
      const int block = static_cast<int>(blockIdx.x) - num_shared_blocks;
      const TurnWalk walk(p, {cut, own, turns}, queue, block + query_warp * blocks,
                          R::kStages * blocks);
      roles(query_warp).bring_queries(p, walk);
    }
  }
}

template <int kWidth, int kRows>
void launch_chunks(Context& context, const AttentionProblem& p, const CUtensorMap& k_map,
                   int* queue) {
  using R = Roles<kWidth, kRows>;
  constexpr int kSharedBytes =
      1024 + R::kBytes + 3 * (kMaxSequences + 1) * static_cast<int>(sizeof(int));
  static_assert(kSharedBytes <= 227 * 1024);
  const auto kernel = codes_kernel<kWidth, kRows>;
  static const bool ready = allow_shared(kernel, kSharedBytes);
  (void)ready;
  const int64_t most = std::max<int64_t>(1, int64_t{p.num_sequences} * p.num_chunks * p.keys.heads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, context.num_multiprocessors()));
  // As many as leave items for all blocks.
  const int turns =
      std::clamp(p.num_sequences * p.keys.heads / static_cast<int>(blocks), 1, kMaxTurns);
  launch("attention", context,
         {.grid = dim3(blocks), .num_threads = R::kThreads, .shared_bytes = kSharedBytes}, kernel,
         p, k_map, turns, queue);
}

template <int kWidth>
void launch_width(Context& context, const AttentionProblem& all, const CUtensorMap& k_map) {
  const auto launch_rows = all.group <= 8 ? launch_chunks<kWidth, 8> : launch_chunks<kWidth, 16>;
  const bool several = all.num_sequences > kMaxSequences;
  for (int sequence = 0, count = 0; sequence < all.num_sequences;
       sequence += kMaxSequences, ++count) {
    AttentionProblem p = all;
    p.num_sequences = std::min(all.num_sequences - sequence, kMaxSequences);
    p.query_offsets += sequence;
    p.context_lengths += sequence;
    p.keys.pages += sequence * p.table_stride;
    const int64_t chunks = int64_t{sequence} * p.keys.heads * p.group * p.num_chunks;
    p.chunk_stats += chunks;
    p.chunk_values += chunks * kWidth;
    if (several) p.shared_pages = nullptr;
    // A launch may begin before the one ahead of it ends.
    launch_rows(context, p, k_map, context.decode_queues() + count % 2);
  }
}

}  // namespace

void attention_decode_codes(Context& context, const AttentionProblem& p,
                            const ops::KvCacheView& cache) {
  const CUtensorMap k_map = key_map_of(cache);
  p.keys.width == 128 ? launch_width<128>(context, p, k_map) : launch_width<64>(context, p, k_map);
}

}  // namespace octet::cuda
