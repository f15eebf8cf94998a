// Chunks of single-token sequences on any device: a warp to each chunk of a sequence, or four warps
// to one that neighbouring sequences share.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

// A row's state after its chunk, by the lanes that hold it.
template <class Tile, int kWidth>
__device__ void write_chunk(const AttentionProblem& p, int sequence, int query_head, int chunk,
                            int lane, int h, const RowState<kWidth>& state, float sum) {
  const int64_t index = chunk_index(p, sequence, query_head, chunk);
  if (lane % 4 == 0) p.chunk_stats[index] = make_float2(state.maximum[h], sum);
#pragma unroll
  for (int tile = 0; tile < kWidth / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      p.chunk_values[index * kWidth + Tile::element_of(tile, i, lane)] = state.out[tile][2 * h + i];
    }
  }
}

template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(32, kWidth <= 128 ? 10 : 1)
    chunks_kernel(const __grid_constant__ AttentionProblem p) {
  using Tile = AttentionTile<kFp8, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const int sequence = blockIdx.z, head = blockIdx.y, chunk = blockIdx.x, lane = threadIdx.x;
  const ChunkRange range = own_chunks(p, sequence);
  if (chunk < range.begin || chunk >= range.end) return;
  const int token = p.query_offsets[sequence], limit = p.context_lengths[sequence];
  const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
  const int begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
  const int end = min((chunk + 1) * kChunkKeys, limit);
  const KeySource keys = keys_of(p, sequence, head);
  const uint32_t base = shared_address(shared);
  // A chunk has at most 32 pages, of eight tokens or more.
  const typename Tile::PageWindow window(keys, begin, limit, lane);
  const auto load_keys = [&](int tile) {
    if (tile < end) Tile::template load<true, 1>(keys, window, tile, limit, base, 0, lane);
    copy_async_commit();
  };
  const auto load_values = [&](int tile) {
    if (tile < end) Tile::template load<false, 1>(keys, window, tile, limit, base, 0, lane);
    copy_async_commit();
  };
  load_keys(begin);
  load_values(begin);

  const int row = lane / 4;
  const Bf16* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int index = row + 8 * h;
    rows[h] = index < p.group
                  ? p.q + token * p.q_stride + (int64_t{head} * p.group + index) * keys.width
                  : nullptr;
  }
  uint32_t q[Tile::kSteps][4];
  float factor[2];
  Tile::load_queries(rows, keys.width, lane, q, factor);
  factor[0] *= p.factor;
  factor[1] *= p.factor;
  RowState<kWidth> state;
  state.clear();
  // The next keys arrive beside the weights and values, the next values beside the keys.
  for (int tile = begin; tile < end; tile += kTileKeys) {
    typename Tile::Scores scores;
    copy_async_wait<1>();
    __syncwarp();
    Tile::multiply_keys(shared, lane, q, scores);
    const int first[2] = {first_key - tile, first_key - tile};
    const int last[2] = {limit - 1 - tile, limit - 1 - tile};
    Tile::weigh(shared, lane, first, last, factor, state, scores);
    __syncwarp();
    load_keys(tile + kTileKeys);
    copy_async_wait<1>();
    __syncwarp();
    Tile::add_values(shared, lane, scores, state);
    __syncwarp();
    load_values(tile + kTileKeys);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int index = row + 8 * h;
    const float sum = state.total(h);
    if (index >= p.group) continue;
    write_chunk<Tile, kWidth>(p, sequence, head * p.group + index, chunk, lane, h, state, sum);
  }
}

constexpr int kWarps = 4;
constexpr int kBlockRows = 16 * kWarps;  // queries: sequences × heads of the group

// Chunks that a sequence leads: keys and values are read once for all sequences behind it that
// share the chunk.
template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    shared_chunks_kernel(const __grid_constant__ AttentionProblem p) {
  using Tile = AttentionTile<kFp8, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t base = shared_address(shared);
  auto* const first = reinterpret_cast<int*>(shared + 2 * Tile::kStageBytes);
  prefix_sums<32 * kWarps>(
      p.num_sequences,
      [&](int s) {
        const ChunkRange range = led_chunks(p, s);
        return range.end - range.begin;
      },
      first);
  __syncthreads();
  int leader = 0;
  for (int index = blockIdx.x;; index += gridDim.x) {
    const int flat = index / p.keys.heads, head = index - flat * p.keys.heads;
    if (flat >= first[p.num_sequences]) return;
    leader = find_sequence(first, p.num_sequences, flat, leader, lane);
    const int chunk = shared_chunks(p, leader) + flat - first[leader];
    int members = 1;
    while (shared_chunks(p, leader + members) > chunk) ++members;
    const int begin = chunk * kChunkKeys, limit = begin + kChunkKeys;
    const KeySource keys = keys_of(p, leader, head);
    const typename Tile::PageWindow window(keys, begin, limit, lane);
    const auto load = [&](int tile, int stage) {
      if (tile < limit) {
        const uint32_t to = base + stage * Tile::kStageBytes;
        Tile::template load<true, kWarps>(keys, window, tile, limit, to, warp, lane);
        Tile::template load<false, kWarps>(keys, window, tile, limit, to, warp, lane);
      }
      copy_async_commit();
    };
    const int num_rows = members * p.group;
    for (int first_row = 0; first_row < num_rows; first_row += kBlockRows) {
      load(begin, 0);
      int sequence[2], query_head[2];
      const Bf16* rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + warp * 16 + lane / 4 + 8 * h;
        const bool inside = row < num_rows;
        sequence[h] = inside ? leader + row / p.group : -1;
        query_head[h] = head * p.group + row % p.group;
        rows[h] = inside ? p.q + p.query_offsets[sequence[h]] * p.q_stride +
                               int64_t{query_head[h]} * keys.width
                         : nullptr;
      }
      uint32_t q[Tile::kSteps][4];
      float factor[2];
      Tile::load_queries(rows, keys.width, lane, q, factor);
      factor[0] *= p.factor;
      factor[1] *= p.factor;
      RowState<kWidth> state;
      state.clear();
      const int none[2] = {0, 0}, all[2] = {kTileKeys - 1, kTileKeys - 1};
      for (int tile = begin, stage = 0; tile < limit; tile += kTileKeys, stage ^= 1) {
        load(tile + kTileKeys, stage ^ 1);
        copy_async_wait<1>();
        __syncthreads();
        const char* at = shared + stage * Tile::kStageBytes;
        typename Tile::Scores scores;
        Tile::multiply_keys(at, lane, q, scores);
        Tile::weigh(at, lane, none, all, factor, state, scores);
        Tile::add_values(at, lane, scores, state);
        __syncthreads();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = state.total(h);
        if (sequence[h] < 0) continue;
        write_chunk<Tile, kWidth>(p, sequence[h], query_head[h], chunk, lane, h, state, sum);
      }
    }
  }
}

template <bool kFp8, int kWidth>
void launch_own(Context& context, const AttentionProblem& p) {
  constexpr int kSharedBytes = AttentionTile<kFp8, kWidth>::kStageBytes;
  const auto kernel = chunks_kernel<kFp8, kWidth>;
  static const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check(status, "attention");
  kernel<<<dim3(static_cast<unsigned>(p.num_chunks), static_cast<unsigned>(p.keys.heads),
                static_cast<unsigned>(p.num_sequences)),
           32, kSharedBytes, context.stream()>>>(p);
  check_launch("attention");
}

template <bool kFp8, int kWidth>
void launch_shared(Context& context, const AttentionProblem& p) {
  constexpr int kStages = 2 * AttentionTile<kFp8, kWidth>::kStageBytes;
  const auto kernel = shared_chunks_kernel<kFp8, kWidth>;
  const int bytes = kStages + (p.num_sequences + 1) * 4;
  static int allowed = 0;
  if (bytes > allowed) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "attention");
    allowed = bytes;
  }
  kernel<<<static_cast<unsigned>(3 * context.num_multiprocessors()), 32 * kWarps,
           static_cast<size_t>(bytes), context.stream()>>>(p);
  check_launch("attention");
}

}  // namespace

void attention_chunks(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  const bool decoded = attention_decode(context, p, cache);
  const auto run = [&](auto fp8, auto width) {
    constexpr bool kFp8 = decltype(fp8)::value;
    constexpr int kWidth = decltype(width)::value;
    if (!decoded) launch_own<kFp8, kWidth>(context, p);
    if (p.shared_pages != nullptr) launch_shared<kFp8, kWidth>(context, p);
  };
  with_kernel_types(cache.k.dtype == tensor::DType::kE4M3, p.keys.width, run);
}

}  // namespace octet::cuda
