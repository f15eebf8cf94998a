// Decoding over BF16 pages on Hopper: warps that walk chunks of single-token sequences. A warp's
// tiles arrive by the tensor memory accelerator, some ahead; keys are the wide operand (S = K Qᵀ, O
// = Vᵀ P), so that a group of up to eight query heads costs one column each.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/decode_tile.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/status.h"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

constexpr int kMaxSequences = 4096;

// Where a warp's copies go: a slot for keys or values, and its barrier.
struct Slot {
  uint32_t tile, barrier;
};

// The warp's lanes ask for the keys or the values of a tile, [tile, end) of the walk's chunk;
// `pages` holds the chunk's page numbers, a lane each.
template <class D>
__device__ void load_tile(const AttentionProblem& p, const CUtensorMap* map, const DecodeWalk& walk,
                          int pages, int tile, const Slot& slot, int lane) {
  const int i = lane % kTilePages;
  const int in_chunk = (tile - walk.chunk * kChunkKeys) / kPageKeys + i;
  const int page = __shfl_sync(0xFFFFFFFFu, pages, in_chunk & 31);
  const bool valid = page >= 0 && tile + i * kPageKeys < walk.end;
  const unsigned count = __popc(__ballot_sync(0xFFFFFFFFu, valid) & 0xFu);
  if (lane == 0) barrier_expect(slot.barrier, count * D::kPageBytes);
  __syncwarp();
  const int row = (page * p.keys.heads + walk.head) * kPageKeys;
  if (valid && lane < kTilePages) {
#pragma unroll
    for (int panel = 0; panel < D::kPanels; ++panel) {
      bulk_copy_box(slot.tile + panel * kPanelBytes + i * kPageKeys * 128, map, panel * 128, row,
                    slot.barrier);
    }
  }
}

// Values outside of keys [first, last] of a tile become zeros: their weight is zero, but what they
// hold, or what was never written, need not be a number.
template <class D>
__device__ void clear_values(char* values, int first, int last, int lane) {
  if (first <= 0 && last >= kTileKeys - 1) return;
  for (int r = lane / 8; r < kTileKeys; r += 4) {
    if (r >= first && r <= last) continue;
#pragma unroll
    for (int panel = 0; panel < D::kPanels; ++panel) {
      *reinterpret_cast<uint4*>(values + panel * kPanelBytes + r * 128 + lane % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }
  fence_async_proxy();
  __syncwarp();
}

// The queries of an item.
template <class D>
__device__ void load_queries(const AttentionProblem& p, const DecodeWalk& walk, int lane,
                             uint32_t (&q)[D::kSteps][2]) {
  const QueryRow row = walk.row(p, lane / 4);
  const Bf16* from = row.sequence < 0 ? nullptr
                                      : p.q + p.query_offsets[row.sequence] * p.q_stride +
                                            int64_t{row.head} * p.keys.width;
  D::load_query(from, lane, q);
}

// Every warp walks chunks of its own, tile by tile; the next keys arrive beside the values' part,
// the next values beside the keys'.
template <int kWidth, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    chunks_kernel(const __grid_constant__ AttentionProblem p,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  using D = Decode<kWidth>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const at = shared + (base - unaligned);
  // Keys and values of all warps, then the sequences' first items.
  int* const first = reinterpret_cast<int*>(at + 2 * kWarps * D::kTileBytes);
  count_items<DecodeWalk, 32 * kWarps>(p, first);
  const auto slot_of = [&](int values) {
    const uint32_t index = 2 * warp + values;
    return Slot{base + index * D::kTileBytes, shared_address(barriers + index)};
  };
  const Slot k_slot = slot_of(0), v_slot = slot_of(1);
  if (lane == 0) {
    barrier_init(k_slot.barrier, 1);
    barrier_init(v_slot.barrier, 1);
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();

  const int stride = static_cast<int>(gridDim.x) * kWarps;
  const int worker = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  DecodeWalk load{};
  bool loading = load.to(p, first, worker, lane);
  int pages = loading ? load.pages(p, lane) : -1, tile_ahead = load.begin;
  const auto load_keys = [&] {
    if (loading) {
      load_tile<D>(p, &k_map, load, pages, tile_ahead, k_slot, lane);
    }
  };
  const auto load_values = [&] {  // and on to the next tile
    if (!loading) return;
    load_tile<D>(p, &v_map, load, pages, tile_ahead, v_slot, lane);
    tile_ahead += kTileKeys;
    if (tile_ahead < load.end) return;
    loading = load.to(p, first, load.index + stride, lane);
    tile_ahead = load.begin;
    if (loading) pages = load.pages(p, lane);
  };
  load_keys();
  load_values();

  char* const keys = at + (k_slot.tile - base);
  char* const values = at + (v_slot.tile - base);
  uint32_t parity = 0;
  DecodeWalk walk{};
  for (int index = worker; walk.to(p, first, index, lane); index += stride) {
    uint32_t q[D::kSteps][2];
    load_queries<D>(p, walk, lane, q);
    typename D::State state;
    state.clear();
    for (int tile = walk.begin; tile < walk.end; tile += kTileKeys) {
      const int first_seen = walk.first_key - tile, last = walk.limit - 1 - tile;
      float weights[4][2][2];
      Fold folds[2];
      barrier_wait(k_slot.barrier, parity);
      D::multiply_keys(keys, lane, q, weights);
      __syncwarp();
      load_keys();
      D::weigh(lane, first_seen, last, p.factor, state, weights, folds);
      barrier_wait(v_slot.barrier, parity);
      clear_values<D>(values, first_seen, last, lane);
      D::add_values(values, lane, weights, folds, state);
      __syncwarp();
      load_values();
      parity ^= 1u;
    }
    D::write(p, walk, lane, state);
  }
}

// For few chunks: four warps take the tiles of one chunk and fold them in order.
template <int kWidth>
__global__ void __launch_bounds__(128, 1)
    split_chunks_kernel(const __grid_constant__ AttentionProblem p,
                        const __grid_constant__ CUtensorMap k_map,
                        const __grid_constant__ CUtensorMap v_map) {
  using D = Decode<kWidth>;
  constexpr int kWarps = kChunkKeys / kTileKeys;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kWarps];
  __shared__ float maxima[kWarps][8], sums[kWarps][8][8];  // of a tile and column; by residue
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const at = shared + (base - unaligned);
  int* const first = reinterpret_cast<int*>(at + 2 * kWarps * D::kTileBytes);
  count_items<DecodeWalk, 32 * kWarps>(p, first);
  const uint32_t index_of_slot = 2 * warp;
  const Slot k_slot{base + index_of_slot * D::kTileBytes, shared_address(barriers + index_of_slot)};
  const Slot v_slot{k_slot.tile + D::kTileBytes, k_slot.barrier + 8};
  if (lane == 0) {
    barrier_init(k_slot.barrier, 1);
    barrier_init(v_slot.barrier, 1);
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();
  char* const keys = at + (k_slot.tile - base);
  char* const values = keys + D::kTileBytes;
  // A tile's values [column][kWidth] lie where its keys were.
  const auto tile_values = [&](int w) {
    return reinterpret_cast<float*>(at + 2 * w * D::kTileBytes);
  };
  uint32_t parity = 0;
  DecodeWalk walk{};
  for (int index = static_cast<int>(blockIdx.x); walk.to(p, first, index, lane);
       index += static_cast<int>(gridDim.x)) {
    const int pages = walk.pages(p, lane);
    const int tile = walk.chunk * kChunkKeys + warp * kTileKeys;
    const int num_tiles = (walk.end - walk.chunk * kChunkKeys + kTileKeys - 1) / kTileKeys;
    const bool mine = tile >= walk.begin && tile < walk.end;
    typename D::State state;
    state.clear();
    if (mine) {
      load_tile<D>(p, &k_map, walk, pages, tile, k_slot, lane);
      load_tile<D>(p, &v_map, walk, pages, tile, v_slot, lane);
      uint32_t q[D::kSteps][2];
      float weights[4][2][2];
      Fold folds[2];
      load_queries<D>(p, walk, lane, q);
      const int first_seen = walk.first_key - tile, last = walk.limit - 1 - tile;
      barrier_wait(k_slot.barrier, parity);
      D::multiply_keys(keys, lane, q, weights);
      D::weigh(lane, first_seen, last, p.factor, state, weights, folds);
      barrier_wait(v_slot.barrier, parity);
      clear_values<D>(values, first_seen, last, lane);
      D::add_values(values, lane, weights, folds, state);
      __syncwarp();
      parity ^= 1u;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * t + e;
      if (g == 0) maxima[warp][column] = state.maximum[e];
      sums[warp][column][key_of(g)] = state.sum[e];
      float* to = tile_values(warp) + column * kWidth;
#pragma unroll
      for (int m = 0; m < D::kMTiles; m += 2) {
        *reinterpret_cast<float4*>(to + D::element_of(m, 0, g)) = make_float4(
            state.out[m][e], state.out[m][2 + e], state.out[m + 1][e], state.out[m + 1][2 + e]);
      }
    }
    __syncthreads();
    // 16 threads fold a column, kWidth / 16 elements each.
    const int column = static_cast<int>(threadIdx.x) / 16, part = threadIdx.x % 16;
    const QueryRow row = walk.row(p, column);
    if (row.sequence >= 0) {
      const int64_t to = chunk_index(p, row.sequence, row.head, walk.chunk);
      float maximum = -INFINITY, out[kWidth / 16] = {}, sum[8] = {};
      for (int w = 0; w < num_tiles; ++w) {
        const Fold f = fold_of(maximum, maxima[w][column]);
        maximum = f.maximum;
        const float* from = tile_values(w) + column * kWidth + part * (kWidth / 16);
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) out[i] = fold(f, out[i], from[i]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fold(f, sum[i], sums[w][column][i]);
      }
      if (part == 0) {
        p.chunk_stats[to] = make_float2(maximum, ((sum[0] + sum[1]) + (sum[2] + sum[3])) +
                                                     ((sum[4] + sum[5]) + (sum[6] + sum[7])));
      }
      float* values_to = p.chunk_values + to * kWidth + part * (kWidth / 16);
#pragma unroll
      for (int i = 0; i < kWidth / 16; i += 4) {
        *reinterpret_cast<float4*>(values_to + i) =
            make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
      }
    }
    fence_async_proxy();  // before the copies that overwrite what was written here
    __syncthreads();
  }
}

template <int kWidth, int kWarps>
bool launch_width(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  using D = Decode<kWidth>;
  CUtensorMap k_map, v_map;
  const int64_t rows = cache.k.shape[0] * cache.num_heads() * kPageKeys;
  const int64_t row_bytes = 2 * kWidth;
  if (!make_tensor_map(k_map, cache.k.data, row_bytes, rows) ||
      !make_tensor_map(v_map, cache.v.data, row_bytes, rows)) {
    return false;
  }
  constexpr int kWarpBytes = 2 * D::kTileBytes;
  constexpr int kMoreBytes = 1024 + (kMaxSequences + 1) * 4;
  const auto chunks = chunks_kernel<kWidth, kWarps>;
  const auto split = split_chunks_kernel<kWidth>;
  static const bool ready = allow_shared(chunks, kWarps * kWarpBytes + kMoreBytes) &&
                            allow_shared(split, 4 * kWarpBytes + kMoreBytes);
  (void)ready;
  const auto multiprocessors = static_cast<unsigned>(context.num_multiprocessors());
  const auto more = static_cast<unsigned>(1024 + (p.num_sequences + 1) * 4);
  // So few chunks that their tiles may all go side by side.
  const int64_t most = std::max<int64_t>(1, int64_t{p.num_sequences} * p.num_chunks * p.keys.heads);
  if (most <= 3 * multiprocessors) {
    launch("attention", context,
           {.grid = dim3(static_cast<unsigned>(most)),
            .num_threads = 128,
            .shared_bytes = 4 * kWarpBytes + more},
           split, p, k_map, v_map);
  } else {
    launch("attention", context,
           {.grid = dim3(multiprocessors),
            .num_threads = 32 * kWarps,
            .shared_bytes = kWarps * kWarpBytes + more},
           chunks, p, k_map, v_map);
  }
  return true;
}

}  // namespace

bool attention_decode(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  const int width = p.keys.width;
  if (cache.k.dtype != tensor::DType::kBF16 || context.portable() ||
      cache.page_size() != kPageKeys || p.group > 8 || p.num_sequences > kMaxSequences ||
      !cache.k.contiguous() || !cache.v.contiguous() || p.q_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(p.q) % 16 != 0) {
    return false;
  }
  if (width == 128) return launch_width<128, 6>(context, p, cache);
  if (width == 64) return launch_width<64, 12>(context, p, cache);
  return false;
}

}  // namespace octet::cuda
