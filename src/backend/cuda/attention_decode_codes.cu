// Decoding over E4M3 pages on Hopper: blocks walk chunks of single-token sequences. A warp has a
// chunk's keys, values and scales brought by the tensor memory accelerator, some chunks ahead;
// others bring the queries' terms; four warpgroups take the chunk's tiles side by side, and all
// fold them.
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
constexpr int kConsumers = 512;      // threads: a warpgroup to each tile of a chunk
constexpr int kLoaders = 2;          // warps: it takes a warp long to ask for one copy
constexpr int kFirstLoader = kConsumers / 32, kFirstQueryWarp = kFirstLoader + kLoaders;
constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);

template <int kWidth, int kRows, Chunks kChunks>
struct Roles {
  using Codes = DecodeCodes<kWidth, kRows>;
  using Walk = octet::cuda::Walk<kRows, kChunks>;
  static constexpr int kStages = kRows <= 8 ? 3 : 2;
  static constexpr int kQueryWarps = kRows <= 8 ? 1 : 2;
  static constexpr int kThreads = kConsumers + 32 * (kLoaders + kQueryWarps);
  static constexpr int kSharedBytes =
      1024 + kStages * Codes::kStageBytes + (kMaxSequences + 1) * static_cast<int>(sizeof(int));

  uint32_t base;  // of the stages, in shared memory
  char* stages;
  uint32_t full, empty;  // barriers, 8 bytes for each stage
  const int* first;      // the sequences' first items
  bool follows;          // as the kernel's

  __device__ void begin() const { follows ? let_successor() : await_predecessor(); }
  __device__ char* stage(int slot) const { return stages + slot * Codes::kStageBytes; }

  // Warps ask for the keys, values and scales of chunk after chunk, for their share of its blocks.
  __device__ void load(const AttentionProblem& p, const CUtensorMap* k_map) const {
    constexpr int kBlocks = kChunkKeys / kBlockKeys, kShare = kBlocks / kLoaders;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int loader = static_cast<int>(threadIdx.x) / 32 - kFirstLoader;
    RingPlace<kStages> place;
    Walk walk{};
    for (int index = static_cast<int>(blockIdx.x); walk.to(p, first, index, lane);
         index += static_cast<int>(gridDim.x)) {
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
      if (index == static_cast<int>(blockIdx.x)) begin();
      barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
      const uint32_t to = base + place.slot * Codes::kStageBytes, barrier = full + 8 * place.slot;
      if (lane == 0) {
        if (loader == 0) {
          *reinterpret_cast<CodesChunk*>(stage(place.slot) + Codes::kChunk) = {
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
          bulk_copy_box(to + Codes::kKeys + block * Codes::kBlockBytes, k_map, 0, from, barrier);
        } else if (valid) {
          bulk_copy(to + Codes::kValues + block * Codes::kBlockBytes,
                    p.keys.v + int64_t{from} * kWidth, Codes::kBlockBytes, barrier);
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
      place.advance();
    }
  }

  // Warps bring the rows' queries as two terms each; a lane takes 16 elements of a row.
  __device__ void bring_queries(const AttentionProblem& p) const {
    constexpr int kRowsAtOnce = 512 / kWidth;  // of a warp
    constexpr int kPasses = std::max(1, kRows / (kRowsAtOnce * kQueryWarps));
    const int warp = static_cast<int>(threadIdx.x) / 32 - kFirstQueryWarp;
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane / kRowsAtOnce;
    const auto row_of = [&](int pass) {
      return (pass * kQueryWarps + warp) * kRowsAtOnce + lane % kRowsAtOnce;
    };
    RingPlace<kStages> place;
    Walk walk{};
    for (int index = static_cast<int>(blockIdx.x); walk.to(p, first, index, lane);
         index += static_cast<int>(gridDim.x)) {
      if (index == static_cast<int>(blockIdx.x)) begin();
      uint4 words[kPasses][2];
      int64_t targets[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const QueryRow row = walk.row(p, row_of(pass));
        targets[pass] = -1;
        words[pass][0] = words[pass][1] = make_uint4(0, 0, 0, 0);
        if (row.sequence < 0) continue;
        targets[pass] = chunk_index(p, row.sequence, row.head, walk.chunk);
        const auto* from =
            reinterpret_cast<const uint4*>(p.q + p.query_offsets[row.sequence] * p.q_stride +
                                           int64_t{row.head} * kWidth + 16 * piece);
        words[pass][0] = from[0];
        words[pass][1] = from[1];
      }
      barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
      char* const to = stage(place.slot);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        write_query(p, to, row_of(pass), piece, words[pass], targets[pass]);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(full + 8 * place.slot);
      place.advance();
    }
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
    char* const at = to + Codes::kQueries + Codes::query_at(2 * row, piece);
    *reinterpret_cast<uint4*>(at) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(at + 16) = make_uint4(low[0], low[1], low[2], low[3]);
    if (piece != 0) return;
    reinterpret_cast<float*>(to + Codes::kFactors)[row] = p.factor * power_of_two(-power);
    reinterpret_cast<int64_t*>(to + Codes::kTargets)[row] = target;
  }

  // Four warpgroups.
  __device__ void consume(const AttentionProblem& p) const {
    const int thread = static_cast<int>(threadIdx.x), tile = thread / 128;
    const int num_items = first[p.num_sequences] * p.keys.heads;
    RingPlace<kStages> place;
    begin();
    for (int index = static_cast<int>(blockIdx.x); index < num_items;
         index += static_cast<int>(gridDim.x)) {
      char* const at = stage(place.slot);
      barrier_wait(full + 8 * place.slot, place.parity);
      const CodesChunk chunk = *reinterpret_cast<const CodesChunk*>(at + Codes::kChunk);
      if (chunk.has(tile)) {
        Codes::attend(at, base + place.slot * Codes::kStageBytes, chunk, tile, 1 + tile);
      }
      asm volatile("bar.sync 5, %0;" ::"n"(kConsumers) : "memory");
      Codes::template fold_tiles<kConsumers>(at, chunk, p.chunk_stats, p.chunk_values, thread);
      fence_async_proxy();  // before the copies that overwrite what was written here
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(empty + 8 * place.slot);
      place.advance();
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
      barrier_init(roles.full + 8 * i, 33 * kLoaders + R::kQueryWarps);
      barrier_init(roles.empty + 8 * i, kConsumers / 32);
    }
    barrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kFirstLoader) {
    roles.consume(p);
  } else if (warp < kFirstQueryWarp) {
    roles.load(p, &k_map);
  } else {
    roles.bring_queries(p);
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
  const int64_t most = int64_t{p.num_sequences} * p.num_chunks * p.keys.heads;
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
    const auto own = p.group <= 4   ? launch_chunks<kWidth, 4, Chunks::kOwn>
                     : p.group <= 8 ? launch_chunks<kWidth, 8, Chunks::kOwn>
                                    : launch_chunks<kWidth, 16, Chunks::kOwn>;
    own(context, p, k_map, follows);
    follows = true;
  }
}

}  // namespace

void attention_decode_codes(Context& context, const AttentionProblem& p,
                            const ops::KvCacheView& cache) {
  CUtensorMap k_map;
  const int64_t rows = cache.k.shape[0] * cache.num_heads() * cache.page_size();
  if (!make_tensor_map(k_map, cache.k.data, p.keys.width, rows)) {
    fail("attention", "the driver makes no tensor map of {} keys of {} bytes; update it", rows,
         p.keys.width);
  }
  p.keys.width == 128 ? launch_width<128>(context, p, k_map) : launch_width<64>(context, p, k_map);
}

}  // namespace octet::cuda
