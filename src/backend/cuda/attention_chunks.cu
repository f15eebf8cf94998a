// Chunks of single-token sequences on any device: a warp to each chunk of a sequence.
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
  const ChunkRange range = chunks_of(p, sequence);
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
    Tile::template clear_unseen<1>(first_key - tile, limit - tile, base, 0, lane);
    __syncwarp();
    Tile::template add_values<false>(shared, lane, first, last, scores, state);
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

template <bool kFp8, int kWidth>
void launch(Context& context, const AttentionProblem& p) {
  constexpr int kSharedBytes = AttentionTile<kFp8, kWidth>::kStageBytes;
  const auto kernel = chunks_kernel<kFp8, kWidth>;
  static const bool ready = allow_shared(kernel, kSharedBytes);
  (void)ready;
  kernel<<<dim3(static_cast<unsigned>(p.num_chunks), static_cast<unsigned>(p.keys.heads),
                static_cast<unsigned>(p.num_sequences)),
           32, kSharedBytes, context.stream()>>>(p);
  check_launch("attention");
}

}  // namespace

void attention_chunks(Context& context, const AttentionProblem& p, bool fp8) {
  with_kernel_types(fp8, p.keys.width, [&](auto kernel_fp8, auto kernel_width) {
    launch<decltype(kernel_fp8)::value, decltype(kernel_width)::value>(context, p);
  });
}

}  // namespace octet::cuda
