// The attention forward. A sequence with one new token goes to the chunks' kernel, a warp to each
// chunk of its keys, and then to the one that folds them; all others go to attention_prefill.cu, or,
// for heads that it does not take, to the tiles' kernel, which walks the chunks in one block of four
// warps. All do the same arithmetic, row by row.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/attention_prefill.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/attention_problem.cuh"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kMaxGroup = 16;  // query heads of one key/value head that a warp's rows hold

struct Problem : AttentionProblem {
  float* partial;
  int num_chunks;
};

__device__ KeySource keys_of(const Problem& p, int sequence, int head) {
  KeySource keys = p.keys;
  keys.pages += sequence * p.table_stride;
  keys.head = head;
  return keys;
}

// A row's result from its final state.
template <int kWidth>
__device__ void write_lse(const Problem& p, int64_t token, int64_t head, float maximum, float sum) {
  if (p.lse != nullptr) {
    p.lse[token * p.lse_stride + head] = (maximum + log2f(sum)) * kLn2;
  }
}

// Partial results of chunk c of (sequence, query head): [maximum, sum, out (kWidth)].
template <int kWidth>
__device__ float* partial_of(const Problem& p, int64_t sequence, int64_t head, int64_t num_heads,
                             int chunk) {
  return p.partial + ((sequence * num_heads + head) * p.num_chunks + chunk) * (kWidth + 2);
}

template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(32, kWidth <= 128 ? 10 : 1)
    chunks_kernel(const __grid_constant__ Problem p) {
  using Tile = AttentionTile<kFp8, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const int sequence = blockIdx.z, head = blockIdx.y, chunk = blockIdx.x, lane = threadIdx.x;
  const int token = p.query_offsets[sequence];
  if (p.query_offsets[sequence + 1] - token != 1) return;
  const int limit = p.context_lengths[sequence];
  const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
  const int begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
  const int end = min((chunk + 1) * kChunkKeys, limit);
  if (begin >= end) return;
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
  const int num_heads = p.keys.heads * p.group;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int index = row + 8 * h;
    const float sum = state.total(h);
    if (index >= p.group) continue;
    float* to = partial_of<kWidth>(p, sequence, head * p.group + index, num_heads, chunk);
    if (lane % 4 == 0) {
      to[0] = state.maximum[h];
      to[1] = sum;
    }
#pragma unroll
    for (int tile = 0; tile < kWidth / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[2 + Tile::element_of(tile, i, lane)] = state.out[tile][2 * h + i];
      }
    }
  }
}

// Folds a row's chunks in order: a thread for each element of the head.
template <int kWidth>
__global__ void __launch_bounds__(kWidth) fold_kernel(const __grid_constant__ Problem p) {
  const int sequence = blockIdx.y, head = blockIdx.x, i = threadIdx.x;
  const int token = p.query_offsets[sequence];
  if (p.query_offsets[sequence + 1] - token != 1) return;
  const int limit = p.context_lengths[sequence];
  const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
  float maximum = -INFINITY, sum = 0, out = 0;
  for (int chunk = first_key / kChunkKeys; chunk * kChunkKeys < limit; ++chunk) {
    const float* from = partial_of<kWidth>(p, sequence, head, gridDim.x, chunk);
    const Fold f = fold_of(maximum, from[0]);
    maximum = f.maximum;
    sum = fold(f, sum, from[1]);
    out = fold(f, out, from[2 + i]);
  }
  if (i < p.keys.width) {
    store(__fdiv_rn(out, sum), p.out + token * p.out_stride + head * p.keys.width + i);
  }
  if (i == 0) write_lse<kWidth>(p, token, head, maximum, sum);
}

constexpr int kWarps = 4;
constexpr int kTileRows = 16 * kWarps;  // query rows of a block: tokens × heads of the group

// Where the tiles of a sequence begin among all blocks: never too close together.
__device__ int first_tile_of(const Problem& p, int sequence) {
  return p.query_offsets[sequence] * p.group / kTileRows + sequence;
}

template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(32 * kWarps) tiles_kernel(const __grid_constant__ Problem p) {
  using Tile = AttentionTile<kFp8, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sequence = 0;
  for (int above = p.num_sequences; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    (first_tile_of(p, middle) <= static_cast<int>(blockIdx.x) ? sequence : above) = middle;
  }
  const int first_token = p.query_offsets[sequence];
  const int new_tokens = p.query_offsets[sequence + 1] - first_token;
  const int first_row = (static_cast<int>(blockIdx.x) - first_tile_of(p, sequence)) * kTileRows;
  if (first_row >= new_tokens * p.group || (p.chunked && new_tokens == 1)) return;
  const int first_position = p.context_lengths[sequence] - new_tokens;
  const KeySource keys = keys_of(p, sequence, head);

  // The keys of the block's rows.
  const int last_row = min(first_row + kTileRows, new_tokens * p.group) - 1;
  const int block_first = first_position + first_row / p.group;
  const int limit = first_position + last_row / p.group + 1;
  const int begin = p.window > 0 ? max(0, block_first + 1 - p.window) / kTileKeys * kTileKeys : 0;

  // The lane's rows.
  const Bf16* rows[2];
  int position[2], token[2], query_head[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + warp * 16 + lane / 4 + 8 * h;
    const bool inside = row <= last_row;
    token[h] = inside ? first_token + row / p.group : -1;
    query_head[h] = head * p.group + row % p.group;
    position[h] = first_position + (inside ? row : last_row) / p.group;
    rows[h] = inside ? p.q + token[h] * p.q_stride + int64_t{query_head[h]} * keys.width : nullptr;
  }
  uint32_t q[Tile::kSteps][4];
  float factor[2];
  Tile::load_queries(rows, keys.width, lane, q, factor);
  factor[0] *= p.factor;
  factor[1] *= p.factor;

  const uint32_t base = shared_address(shared);
  const auto load = [&](int tile, int stage) {
    if (tile < limit) {
      const typename Tile::PageWindow window(keys, tile, limit, lane);
      const uint32_t to = base + stage * Tile::kStageBytes;
      Tile::template load<true, kWarps>(keys, window, tile, limit, to, warp, lane);
      Tile::template load<false, kWarps>(keys, window, tile, limit, to, warp, lane);
    }
    copy_async_commit();
  };
  // The folded result lies in shared memory, a lane's registers side by side over the warp.
  auto* folded =
      reinterpret_cast<float*>(shared + 2 * Tile::kStageBytes) + warp * (16 * kWidth) + lane;
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) folded[32 * i] = 0;
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  RowState<kWidth> state;
  state.clear();
  load(begin, 0);
  for (int tile = begin, stage = 0; tile < limit; tile += kTileKeys, stage ^= 1) {
    load(tile + kTileKeys, stage ^ 1);
    copy_async_wait<1>();
    __syncthreads();
    int first[2], last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first[h] = p.window > 0 ? position[h] + 1 - p.window - tile : 0;
      last[h] = position[h] - tile;
    }
    const char* at = shared + stage * Tile::kStageBytes;
    typename Tile::Scores scores;
    Tile::multiply_keys(at, lane, q, scores);
    Tile::weigh(at, lane, first, last, factor, state, scores);
    Tile::add_values(at, lane, scores, state);
    if ((tile + kTileKeys) % kChunkKeys == 0 || tile + kTileKeys >= limit) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float chunk_sum = state.total(h);
        const Fold f = fold_of(maximum[h], state.maximum[h]);
        maximum[h] = f.maximum;
        sum[h] = fold(f, sum[h], chunk_sum);
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& out = folded[32 * (4 * n + 2 * h + i)];
            out = fold(f, out, state.out[n][2 * h + i]);
          }
        }
      }
      state.clear();
    }
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (token[h] < 0) continue;
    Bf16* to = p.out + token[h] * p.out_stride + int64_t{query_head[h]} * keys.width;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int element = Tile::element_of(n, i, lane);
        if (element < keys.width) {
          store(__fdiv_rn(folded[32 * (4 * n + 2 * h + i)], sum[h]), to + element);
        }
      }
    }
    if (lane % 4 == 0) write_lse<kWidth>(p, token[h], query_head[h], maximum[h], sum[h]);
  }
}

template <class Kernel>
void set_shared(Kernel kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "attention");
}

template <bool kFp8, int kWidth>
void launch(Context& context, Problem& p, int64_t num_tokens, const ops::AttentionBatch& batch) {
  using Tile = AttentionTile<kFp8, kWidth>;
  constexpr int kChunkShared = Tile::kStageBytes;
  constexpr int kTileShared = 2 * Tile::kStageBytes + kTileRows * kWidth * 4;
  static const bool ready = [] {
    set_shared(chunks_kernel<kFp8, kWidth>, kChunkShared);
    set_shared(tiles_kernel<kFp8, kWidth>, kTileShared);
    return true;
  }();
  (void)ready;
  const auto sequences = static_cast<unsigned>(p.num_sequences);
  const auto heads = static_cast<unsigned>(p.keys.heads);
  const cudaStream_t stream = context.stream();
  p.chunked = p.group <= kMaxGroup;
  if (p.chunked) {
    const int64_t longest =
        batch.max_context > 0 ? batch.max_context : int64_t{p.keys.max_pages} << p.keys.page_shift;
    p.num_chunks = static_cast<int>(divide_up(longest, kChunkKeys));
    p.partial = context.scratch<float>(
        kScratchAttention, int64_t{sequences} * heads * p.group * p.num_chunks * (kWidth + 2));
    chunks_kernel<kFp8, kWidth>
        <<<dim3(static_cast<unsigned>(p.num_chunks), heads, sequences), 32, kChunkShared, stream>>>(
            p);
    fold_kernel<kWidth>
        <<<dim3(heads * static_cast<unsigned>(p.group), sequences), kWidth, 0, stream>>>(p);
  }
  if (!p.chunked || batch.max_query_tokens != 1) {
    if (prefill_takes(p)) {
      launch_prefill(context, p, kFp8, num_tokens);
      return;
    }
    const auto tiles = static_cast<unsigned>(num_tokens * p.group / kTileRows) + sequences;
    tiles_kernel<kFp8, kWidth><<<dim3(tiles, heads), 32 * kWarps, kTileShared, stream>>>(p);
  }
  check_launch("attention");
}

}  // namespace

void attention(Context& context, const ops::AttentionArgs& args) {
  constexpr std::string_view kOp = "attention";
  require_cache(kOp, args.cache);
  require_rank(kOp, "q", args.q, 3, 3);
  require_dtype(kOp, "q", args.q, {DType::kBF16});
  require_like(kOp, "out", args.out, args.q);
  const int64_t num_tokens = args.q.shape[0], num_heads = args.q.shape[1], width = args.q.shape[2];
  const Shape& cache = args.cache.k.shape;
  const int64_t kv_heads = args.cache.num_heads(), page_size = args.cache.page_size();
  if (num_heads < 1 || num_heads % kv_heads != 0 || width != cache[3]) {
    fail(kOp, "q {} does not fit {} key/value heads of width {}", args.q.shape.to_string(),
         kv_heads, cache[3]);
  }
  const bool fp8 = args.cache.k.dtype == DType::kE4M3;
  if (width % (fp8 ? 16 : 8) != 0) {
    fail(kOp, "on CUDA the head width must be a multiple of {} with this cache, but is {}",
         fp8 ? 16 : 8, width);
  }
  if ((page_size & (page_size - 1)) != 0 || page_size < 8) {
    fail(kOp, "on CUDA the page size must be a power of two from 8 up, but is {}", page_size);
  }
  if (!args.lse.empty()) {
    require_dtype(kOp, "lse", args.lse, {DType::kF32});
    require_shape(kOp, "lse", args.lse, Shape{num_tokens, num_heads});
  }
  require_rank(kOp, "page_table", args.batch.page_table, 2, 2);
  require_dtype(kOp, "page_table", args.batch.page_table, {DType::kI32});
  const int64_t num_sequences = args.batch.page_table.shape[0];
  require_vector(kOp, "query_offsets", args.batch.query_offsets, DType::kI32, num_sequences + 1);
  require_vector(kOp, "context_lengths", args.batch.context_lengths, DType::kI32, num_sequences);
  if (num_tokens == 0 || num_sequences == 0) return;

  Problem p{};
  p.q = args.q.as<Bf16>();
  p.q_stride = args.q.row_stride;
  p.out = args.out.as<Bf16>();
  p.out_stride = args.out.row_stride;
  p.lse = args.lse.as<float>();
  p.lse_stride = args.lse.row_stride;
  p.keys.k = args.cache.k.as<char>();
  p.keys.v = args.cache.v.as<char>();
  p.keys.k_scales = args.cache.k_scale.as<float>();
  p.keys.v_scales = args.cache.v_scale.as<float>();
  p.keys.pages = args.batch.page_table.as<int32_t>();
  p.keys.page_stride = args.cache.k.row_stride;
  p.keys.scale_page_stride = args.cache.k_scale.row_stride;
  while ((int64_t{1} << p.keys.page_shift) < page_size) ++p.keys.page_shift;
  p.keys.num_pages = static_cast<int>(cache[0]);
  p.keys.max_pages = static_cast<int>(args.batch.page_table.shape[1]);
  p.keys.heads = static_cast<int>(kv_heads);
  p.keys.width = static_cast<int>(width);
  p.table_stride = args.batch.page_table.row_stride;
  p.query_offsets = args.batch.query_offsets.as<int32_t>();
  p.context_lengths = args.batch.context_lengths.as<int32_t>();
  p.num_sequences = static_cast<int>(num_sequences);
  p.group = static_cast<int>(num_heads / kv_heads);
  p.group_inverse = static_cast<uint32_t>((uint64_t{1} << 32) / p.group + (p.group > 1 ? 1 : 0));
  p.window = static_cast<int>(std::min<int64_t>(args.window, 1 << 30));
  p.factor = args.scale * kLog2E;
  const auto run = [&](auto fp8_cache) {
    constexpr bool kFp8 = decltype(fp8_cache)::value;
    if (width <= 64) return launch<kFp8, 64>(context, p, num_tokens, args.batch);
    if (width <= 128) return launch<kFp8, 128>(context, p, num_tokens, args.batch);
    return launch<kFp8, 256>(context, p, num_tokens, args.batch);
  };
  fp8 ? run(std::true_type()) : run(std::false_type());
}

}  // namespace octet::cuda
