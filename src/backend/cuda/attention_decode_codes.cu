// Decoding over E4M3 pages on Hopper: blocks walk chunks of single-token sequences, a few at once.
// Each of these has a stage of shared memory, which warps of its own fill (the tensor memory
// accelerator brings keys and values) and a warpgroup works on. Chunks that sequences share go
// first, in the launch of attention_shared_codes.cu, which this one need not wait for.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/attention_shared_codes.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_codes.cuh"
#include "backend/cuda/device/decode_turns.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/status.h"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

constexpr int kMaxTurns = 8;  // of an item
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
  using Walk = TurnWalk<kStages>;
  static constexpr int kSharedBytes = 1024 + kStages * Codes::kStageBytes +
                                      2 * (kMaxDecodeSequences + 1) * static_cast<int>(sizeof(int));

  uint32_t base;  // of the stages, in shared memory
  char* stages;
  // Barriers of 8 bytes for each stage: keys, queries and scales have come, values have; keys may
  // be overwritten, all else may.
  uint32_t keys_full, values_full, keys_empty, values_empty;
  TurnLists lists;
  bool follows;  // as the kernel's

  __device__ void begin() const { follows ? let_successor() : await_predecessor(); }
  __device__ char* stage(int slot) const { return stages + slot * Codes::kStageBytes; }

  // Calls body(walk, parity of the stage's turn) for the turns of a stage, and once more for the
  // empty one that ends them.
  template <class Body>
  __device__ void for_turns(const AttentionProblem& p, int slot, const Body& body) const {
    Walk walk(p, lists, slot);
    bool more = true;
    for (uint32_t parity = 0; more; parity ^= 1) {
      more = walk.next();
      body(walk, parity);
    }
  }

  // A warp asks for its share of the keys and values of a stage's chunks, and brings their scales.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map, int slot,
                       int loader) const {
    constexpr int kBlocks = Codes::kBlocks, kShare = kBlocks / kLoaders;
    static_assert(4 * kShare == 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t to = base + slot * Codes::kStageBytes, at = 8 * slot;
    const uint32_t own = ((1u << kShare) - 1) << loader * kShare;
    int held = -1;  // the row of the lane's block that the stage holds as it is in the cache
    for_turns(p, slot, [&](const Walk& walk, uint32_t parity) {
      // A lane finds the row in the cache with which a block begins.
      const int chunk_begin = walk.chunk * kChunkKeys;
      const int position = chunk_begin + lane % kBlocks * kBlockKeys;
      const int table = position >> p.keys.page_shift;
      const bool inside = position >= walk.begin && position < walk.end && table < p.keys.max_pages;
      const int page = inside ? p.keys.pages[walk.sequence * p.table_stride + table] : -1;
      const bool here = page >= 0 && page < p.keys.num_pages;
      const int row = ((page * p.keys.heads + walk.head) << p.keys.page_shift) +
                      (position & ((1 << p.keys.page_shift) - 1));
      const uint32_t blocks = __ballot_sync(0xFFFFFFFFu, here) & ((1u << kBlocks) - 1);
      const uint32_t values = own & blocks & ~__ballot_sync(0xFFFFFFFFu, row == held);
      const uint32_t keys = values | (own & blocks & Codes::kKeysLost);
      held = here && position + kBlockKeys <= walk.end ? row : -1;
      begin();
      // Of the scales a lane takes four keys'.
      const int scales = loader * (32 * 4) + lane * 4;  // of the chunk's
      const int scales_row = __shfl_sync(0xFFFFFFFFu, row, scales / kBlockKeys) + lane % 4 * 4;
      const bool has_scales = (blocks >> scales / kBlockKeys & 1u) != 0;
      float4 k_scales, v_scales;
      if (has_scales) {
        k_scales = *reinterpret_cast<const float4*>(p.keys.k_scales + scales_row);
        v_scales = *reinterpret_cast<const float4*>(p.keys.v_scales + scales_row);
      }
      const uint64_t policy = walk.cut ? read_again() : read_once();
      const int block = loader * kShare + lane % kShare;
      const int from = __shfl_sync(0xFFFFFFFFu, row, block);
      barrier_wait(keys_empty + at, parity ^ 1);
      if (lane == 0) barrier_expect(keys_full + at, __popc(keys) * Codes::kBlockBytes);
      __syncwarp();
      if (lane < kShare && (keys >> block & 1u) != 0) {
        bulk_copy_box(to + Codes::kKeys + block * Codes::kBlockBytes, k_map, 0, from,
                      keys_full + at, policy);
      }
      barrier_wait(values_empty + at, parity ^ 1);
      if (lane == 0) {
        if (loader == 0) {
          *reinterpret_cast<CodesChunk*>(stage(slot) + Codes::kChunk) = {
              max(walk.first_key - chunk_begin, 0), walk.end - chunk_begin, blocks};
        }
        barrier_expect(values_full + at, __popc(values) * Codes::kBlockBytes);
      }
      __syncwarp();
      if (lane < kShare && (values >> block & 1u) != 0) {
        bulk_copy(to + Codes::kValues + block * Codes::kBlockBytes,
                  p.keys.v + int64_t{from} * kWidth, Codes::kBlockBytes, values_full + at, policy);
      }
      if (has_scales) {
        *reinterpret_cast<float4*>(stage(slot) + Codes::kKeyScales + scales * 4) = k_scales;
        *reinterpret_cast<float4*>(stage(slot) + Codes::kValueScales + scales * 4) = v_scales;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(keys_full + at);
    });
  }

  // A warp brings the queries of a stage's turns, as two terms each; a lane takes 16 elements of a
  // row.
  __device__ void bring_queries(const AttentionProblem& p, int slot) const {
    constexpr int kAtOnce = 512 / kWidth, kPasses = kRows / kAtOnce;  // rows
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane / kAtOnce;
    const auto row_of = [&](int pass) { return pass * kAtOnce + lane % kAtOnce; };
    for_turns(p, slot, [&](const Walk& walk, uint32_t parity) {
      const int query_head = walk.head * p.group;
      const Bf16* const from = p.q + p.query_offsets[walk.sequence] * p.q_stride +
                               int64_t{query_head} * kWidth + 16 * piece;
      begin();
      Query queries[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        uint4 words[2] = {};
        if (row_of(pass) < p.group && !walk.empty()) {
          const auto* row = reinterpret_cast<const uint4*>(from + row_of(pass) * kWidth);
          words[0] = row[0];
          words[1] = row[1];
        }
        queries[pass] = query_of(words);
      }
      barrier_wait(values_empty + 8 * slot, parity ^ 1);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row_of(pass), at = Codes::query_at(row, piece);
        char* const to = stage(slot);
        *reinterpret_cast<uint4*>(to + Codes::kLowQueries + at) = queries[pass].low;
        *reinterpret_cast<uint4*>(to + Codes::kHighQueries + at) = queries[pass].high;
        if (piece != 0) continue;
        reinterpret_cast<float*>(to + Codes::kFactors)[row] =
            p.factor * power_of_two(-queries[pass].power);
        reinterpret_cast<int64_t*>(to + Codes::kTargets)[row] =
            row < p.group ? chunk_index(p, walk.sequence, query_head + row, walk.chunk) : -1;
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(keys_full + 8 * slot);
    });
  }

  // 16 elements of a row's query as terms; the other ones are with lanes of the same row.
  struct Query {
    uint4 high, low;
    int power;
  };
  __device__ static Query query_of(const uint4 (&words)[2]) {
    const uint32_t w[8] = {words[0].x, words[0].y, words[0].z, words[0].w,
                           words[1].x, words[1].y, words[1].z, words[1].w};
    float x[16], amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[2 * i] = __uint_as_float(w[i] << 16);
      x[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
      amax = fmaxf(amax, fmaxf(fabsf(x[2 * i]), fabsf(x[2 * i + 1])));
    }
#pragma unroll
    for (int offset = 512 / kWidth; offset < 32; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    }
    const int power = query_power(amax);
    const float scale = power_of_two(power);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const TermPairs a = e4m3_terms(x[4 * i] * scale, x[4 * i + 1] * scale);
      const TermPairs b = e4m3_terms(x[4 * i + 2] * scale, x[4 * i + 3] * scale);
      high[i] = a.high | b.high << 16;
      low[i] = a.low | b.low << 16;
    }
    return {make_uint4(high[0], high[1], high[2], high[3]),
            make_uint4(low[0], low[1], low[2], low[3]), power};
  }

  // A warpgroup takes the turns of a stage.
  __device__ void consume(const AttentionProblem& p, int slot) const {
    const auto release = [&](uint32_t barrier) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier + 8 * slot);
    };
    begin();
    for (uint32_t parity = 0;; parity ^= 1) {
      barrier_wait(keys_full + 8 * slot, parity);
      if (reinterpret_cast<const CodesChunk*>(stage(slot) + Codes::kChunk)->end == 0) {
        return;
      }
      Codes::attend(
          stage(slot), base + slot * Codes::kStageBytes, p.chunk_stats, p.chunk_values, 1 + slot,
          [&] { release(keys_empty); }, [&] { barrier_wait(values_full + 8 * slot, parity); },
          [&] { release(values_empty); });
    }
  }
};

// `follows`: a launch of this file stands before this one. It changes nothing that this one reads,
// and what was before it is done.
template <int kWidth, int kRows>
__global__ void __launch_bounds__(Roles<kWidth, kRows>::kThreads, 1)
    codes_kernel(const __grid_constant__ AttentionProblem p,
                 const __grid_constant__ CUtensorMap k_map, const int turns, const bool follows) {
  using R = Roles<kWidth, kRows>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[4 * R::kStages];
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const stages = shared + (base - unaligned);
  int* const cut = reinterpret_cast<int*>(stages + R::kStages * R::Codes::kStageBytes);
  const TurnLists lists{cut, cut + kMaxDecodeSequences + 1, turns};
  lists.count<R::kThreads>(p);
  const auto barriers_of = [&](int i) { return shared_address(barriers + i * R::kStages); };
  const R roles{base,           stages,         barriers_of(0), barriers_of(1),
                barriers_of(2), barriers_of(3), lists,          follows};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8 * R::kStages; i += 8) {
      barrier_init(roles.keys_full + i, 2 * R::kLoaders + 1);
      barrier_init(roles.values_full + i, R::kLoaders);
      barrier_init(roles.keys_empty + i, 4);
      barrier_init(roles.values_empty + i, 4);
    }
    barrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < R::kFirstLoader) {
    take_registers<R::kConsumerRegisters>();
    roles.consume(p, warp / 4);
  } else {
    give_registers<R::kHelperRegisters>();
    const int loader = warp - R::kFirstLoader, query_warp = warp - R::kFirstQueryWarp;
    if (query_warp < 0) {
      roles.load(p, &k_map, loader / R::kLoaders, loader % R::kLoaders);
    } else if (query_warp < R::kStages) {
      roles.bring_queries(p, query_warp);
    }
  }
  if (follows) await_predecessor();  // so that what follows this one follows both
}

template <int kWidth, int kRows>
void launch_chunks(Context& context, const AttentionProblem& p, const CUtensorMap& k_map,
                   bool follows) {
  using R = Roles<kWidth, kRows>;
  const auto kernel = codes_kernel<kWidth, kRows>;
  static const bool ready = allow_shared(kernel, R::kSharedBytes);
  (void)ready;
  const int64_t most = std::max<int64_t>(1, int64_t{p.num_sequences} * p.num_chunks * p.keys.heads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, context.num_multiprocessors()));
  // As many as leave items for all stages.
  const int turns =
      std::clamp(p.num_sequences * p.keys.heads / static_cast<int>(blocks), 1, kMaxTurns);
  launch("attention", context,
         {.grid = dim3(blocks), .num_threads = R::kThreads, .shared_bytes = R::kSharedBytes},
         kernel, p, k_map, turns, follows);
}

template <int kWidth>
void launch_width(Context& context, const AttentionProblem& all, const CUtensorMap& k_map) {
  const bool several = all.num_sequences > kMaxDecodeSequences;
  bool follows = false;
  for (int sequence = 0; sequence < all.num_sequences; sequence += kMaxDecodeSequences) {
    AttentionProblem p = all;
    p.num_sequences = std::min(all.num_sequences - sequence, kMaxDecodeSequences);
    p.query_offsets += sequence;
    p.context_lengths += sequence;
    p.keys.pages += sequence * p.table_stride;
    const int64_t chunks = int64_t{sequence} * p.keys.heads * p.group * p.num_chunks;
    p.chunk_stats += chunks;
    p.chunk_values += chunks * kWidth;
    if (several) p.shared_pages = nullptr;
    if (p.shared_pages != nullptr) {
      attention_shared_codes(context, p, k_map);
      follows = true;
    }
    const auto own = p.group <= 8 ? launch_chunks<kWidth, 8> : launch_chunks<kWidth, 16>;
    own(context, p, k_map, follows);
    follows = true;
  }
}

}  // namespace

void attention_decode_codes(Context& context, const AttentionProblem& p,
                            const ops::KvCacheView& cache) {
  const CUtensorMap k_map = key_map_of(cache);
  p.keys.width == 128 ? launch_width<128>(context, p, k_map) : launch_width<64>(context, p, k_map);
}

}  // namespace octet::cuda
