// Decoding over E4M3 pages on Hopper: blocks walk chunks of single-token sequences, a few at once.
// Each of these has a stage of shared memory, which warps of its own fill (the tensor memory
// accelerator brings keys and values) and a warpgroup works on. Chunks that sequences share go
// first, in a launch that the other need not wait for.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_codes.cuh"
#include "backend/cuda/device/decode_walk.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/status.h"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

constexpr int kMaxSequences = 1024;  // of a launch
constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);

template <int kWidth, int kRows, Chunks kChunks>
struct Roles {
  using Codes = DecodeCodes<kWidth, kRows>;
  using Walk = octet::cuda::Walk<kRows, kChunks>;
  // A stage has a warpgroup, loaders (it takes a warp long to ask for one copy) and query warps;
  // the block's warps are ordered by role, then stage.
  static constexpr bool kMany = kRows > 16;
  static constexpr int kStages = kMany ? 2 : 3;
  static constexpr int kLoaders = kMany ? 1 : 2, kQueryWarps = kMany ? 2 : 1;
  static constexpr int kFirstLoader = 4 * kStages;
  static constexpr int kFirstQueryWarp = kFirstLoader + kStages * kLoaders;
  static constexpr int kThreads = 32 * (kFirstQueryWarp + kStages * kQueryWarps);
  static constexpr int kSharedBytes =
      1024 + kStages * Codes::kStageBytes + (kMaxSequences + 1) * static_cast<int>(sizeof(int));

  uint32_t base;  // of the stages, in shared memory
  char* stages;
  uint32_t full, empty;  // barriers, 8 bytes for each stage
  const int* first;      // the sequences' first items
  bool follows;          // as the kernel's

  __device__ void begin() const { follows ? let_successor() : await_predecessor(); }
  __device__ char* stage(int slot) const { return stages + slot * Codes::kStageBytes; }

  // Calls body(walk, parity of the stage's turn) for the items of a stage.
  template <class Body>
  __device__ void for_items(const AttentionProblem& p, int slot, const Body& body) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, blocks = static_cast<int>(gridDim.x);
    uint32_t parity = 0;
    Walk walk{};
    for (int index = static_cast<int>(blockIdx.x) + slot * blocks; walk.to(p, first, index, lane);
         index += kStages * blocks) {
      body(walk, parity);
      parity ^= 1;
    }
  }

  // A warp asks for its share of the keys, values and scales of a stage's chunks.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map, int slot,
                       int loader) const {
    constexpr int kBlocks = Codes::kBlocks, kShare = kBlocks / kLoaders;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint64_t policy = kChunks == Chunks::kOwn ? read_once() : read_again();
    const uint32_t to = base + slot * Codes::kStageBytes, barrier = full + 8 * slot;
    for_items(p, slot, [&](const Walk& walk, uint32_t parity) {
      // A lane finds the row in the cache with which a block begins.
      const int chunk_begin = walk.chunk * kChunkKeys;
      const int position = chunk_begin + lane % kBlocks * kBlockKeys;
      const int table = position >> p.keys.page_shift;
      const bool inside = position >= walk.begin && position < walk.end && table < p.keys.max_pages;
      const int page = inside ? p.keys.pages[walk.sequence * p.table_stride + table] : -1;
      const uint32_t blocks =
          __ballot_sync(0xFFFFFFFFu, page >= 0 && page < p.keys.num_pages) & ((1u << kBlocks) - 1);
      const int row = ((page * p.keys.heads + walk.head) << p.keys.page_shift) +
                      (position & ((1 << p.keys.page_shift) - 1));
      begin();
      barrier_wait(empty + 8 * slot, parity ^ 1);
      if (lane == 0) {
        if (loader == 0) {
          *reinterpret_cast<CodesChunk*>(stage(slot) + Codes::kChunk) = {
              max(walk.first_key - chunk_begin, 0), walk.end - chunk_begin, blocks};
        }
        const uint32_t own = blocks >> loader * kShare & ((1u << kShare) - 1);
        barrier_expect(barrier, __popc(own) * 2 * Codes::kBlockBytes);
      }
      __syncwarp();
      {
        const int block = loader * kShare + lane % kShare;
        const int from = __shfl_sync(0xFFFFFFFFu, row, block);
        const bool valid = lane < 2 * kShare && (blocks >> block & 1u) != 0;
        if (valid && lane < kShare) {
          bulk_copy_box(to + Codes::kKeys + block * Codes::kBlockBytes, k_map, 0, from, barrier,
                        policy);
        } else if (valid) {
          bulk_copy(to + Codes::kValues + block * Codes::kBlockBytes,
                    p.keys.v + int64_t{from} * kWidth, Codes::kBlockBytes, barrier, policy);
        }
      }
      // Of the scales a lane takes four keys'.
#pragma unroll
      for (int i = 0; i < 4 * kShare; i += 32) {
        const int block = loader * kShare + (i + lane) / 4, part = lane % 4 * 4;
        const int from = __shfl_sync(0xFFFFFFFFu, row, block) + part;
        if ((blocks >> block & 1u) == 0 || i + lane >= 4 * kShare) continue;
        const uint32_t at = to + (block * kBlockKeys + part) * 4;
        copy_async_16(at + Codes::kKeyScales, p.keys.k_scales + from, true);
        copy_async_16(at + Codes::kValueScales, p.keys.v_scales + from, true);
      }
      barrier_arrive_after_copies(barrier);
    });
  }

  // A warp brings its share of the queries of a stage's chunks, as two terms each; a lane takes 16
  // elements of a row.
  __device__ void bring_queries(const AttentionProblem& p, int slot, int warp) const {
    constexpr int kRowsAtOnce = 512 / kWidth;
    constexpr int kPasses = std::max(1, kRows / (kRowsAtOnce * kQueryWarps));
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane / kRowsAtOnce;
    const auto row_of = [&](int pass) {
      return (pass * kQueryWarps + warp) * kRowsAtOnce + lane % kRowsAtOnce;
    };
    for_items(p, slot, [&](const Walk& walk, uint32_t parity) {
      QueryRow rows[kPasses];
      int64_t targets[kPasses];
      const Bf16* from[kPasses];
      uint4 words[kPasses][2];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) rows[pass] = walk.row(p, row_of(pass));
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const bool valid = rows[pass].sequence >= 0;
        const int token = p.query_offsets[valid ? rows[pass].sequence : 0];
        targets[pass] =
            valid ? chunk_index(p, rows[pass].sequence, rows[pass].head, walk.chunk) : -1;
        from[pass] = p.q + token * p.q_stride + int64_t{rows[pass].head} * kWidth + 16 * piece;
      }
      begin();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        words[pass][0] = words[pass][1] = make_uint4(0, 0, 0, 0);
        if (targets[pass] < 0) continue;
        words[pass][0] = reinterpret_cast<const uint4*>(from[pass])[0];
        words[pass][1] = reinterpret_cast<const uint4*>(from[pass])[1];
      }
      barrier_wait(empty + 8 * slot, parity ^ 1);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        write_query(p, stage(slot), row_of(pass), piece, words[pass], targets[pass]);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(full + 8 * slot);
    });
  }

  __device__ static void write_query(const AttentionProblem& p, char* to, int row, int piece,
                                     const uint4 (&words)[2], int64_t target) {
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
    if (row >= kRows) return;
    const int at = Codes::query_at(row, piece);
    *reinterpret_cast<uint4*>(to + Codes::kLowQueries + at) =
        make_uint4(low[0], low[1], low[2], low[3]);
    *reinterpret_cast<uint4*>(to + Codes::kHighQueries + at) =
        make_uint4(high[0], high[1], high[2], high[3]);
    if (piece != 0) return;
    reinterpret_cast<float*>(to + Codes::kFactors)[row] = p.factor * power_of_two(-power);
    reinterpret_cast<int64_t*>(to + Codes::kTargets)[row] = target;
  }

  // A warpgroup takes the chunks of a stage.
  __device__ void consume(const AttentionProblem& p, int slot) const {
    const int num_items = first[p.num_sequences] * p.keys.heads;
    const int blocks = static_cast<int>(gridDim.x);
    uint32_t parity = 0;
    begin();
    for (int index = static_cast<int>(blockIdx.x) + slot * blocks; index < num_items;
         index += kStages * blocks) {
      barrier_wait(full + 8 * slot, parity);
      Codes::attend(stage(slot), base + slot * Codes::kStageBytes, p.chunk_stats, p.chunk_values,
                    1 + slot, [&] {
                      __syncwarp();
                      if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * slot);
                    });
      parity ^= 1;
    }
  }
};

// `follows`: a launch of this file stands before this one. It changes nothing that this one reads,
// and what was before it is done.
template <int kWidth, int kRows, Chunks kChunks>
__global__ void __launch_bounds__(Roles<kWidth, kRows, kChunks>::kThreads, 1)
    codes_kernel(const __grid_constant__ AttentionProblem p,
                 const __grid_constant__ CUtensorMap k_map, const bool follows) {
  using R = Roles<kWidth, kRows, kChunks>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[2 * R::kStages];
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const stages = shared + (base - unaligned);
  int* const first = reinterpret_cast<int*>(stages + R::kStages * R::Codes::kStageBytes);
  count_items<typename R::Walk, R::kThreads>(p, first);
  const R roles{base,  stages, shared_address(barriers), shared_address(barriers + R::kStages),
                first, follows};
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kStages; ++i) {
      barrier_init(roles.full + 8 * i, 33 * R::kLoaders + R::kQueryWarps);
      barrier_init(roles.empty + 8 * i, 4);
    }
    barrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < R::kFirstLoader) {
    roles.consume(p, warp / 4);
  } else if (warp < R::kFirstQueryWarp) {
    const int loader = warp - R::kFirstLoader;
    roles.load(p, &k_map, loader / R::kLoaders, loader % R::kLoaders);
  } else {
    const int query_warp = warp - R::kFirstQueryWarp;
    roles.bring_queries(p, query_warp / R::kQueryWarps, query_warp % R::kQueryWarps);
  }
  if (follows) await_predecessor();  // so that what follows this one follows both
}

template <int kWidth, int kRows, Chunks kChunks>
void launch_chunks(Context& context, const AttentionProblem& p, const CUtensorMap& k_map,
                   bool follows) {
  using R = Roles<kWidth, kRows, kChunks>;
  const auto kernel = codes_kernel<kWidth, kRows, kChunks>;
  static const bool ready = allow_shared(kernel, R::kSharedBytes);
  (void)ready;
  const int64_t most = std::max<int64_t>(1, int64_t{p.num_sequences} * p.num_chunks * p.keys.heads);
  launch(
      "attention", context,
      {.grid = dim3(static_cast<unsigned>(std::min<int64_t>(most, context.num_multiprocessors()))),
       .num_threads = R::kThreads,
       .shared_bytes = R::kSharedBytes},
      kernel, p, k_map, follows);
}

template <int kWidth>
void launch_width(Context& context, const AttentionProblem& all, const CUtensorMap& k_map) {
  const bool several = all.num_sequences > kMaxSequences;
  bool follows = false;
  for (int sequence = 0; sequence < all.num_sequences; sequence += kMaxSequences) {
    AttentionProblem p = all;
    p.num_sequences = std::min(all.num_sequences - sequence, kMaxSequences);
    p.query_offsets += sequence;
    p.context_lengths += sequence;
    p.keys.pages += sequence * p.table_stride;
    const int64_t chunks = int64_t{sequence} * p.keys.heads * p.group * p.num_chunks;
    p.chunk_stats += chunks;
    p.chunk_values += chunks * kWidth;
    if (several) p.shared_pages = nullptr;
    if (p.shared_pages != nullptr) {
      launch_chunks<kWidth, 32, Chunks::kShared>(context, p, k_map, follows);
      follows = true;
    }
    const auto own = p.group <= 8 ? launch_chunks<kWidth, 8, Chunks::kOwn>
                                  : launch_chunks<kWidth, 16, Chunks::kOwn>;
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
