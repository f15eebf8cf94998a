// The attention forward. A sequence with one new token goes by chunks, which are folded afterwards;
// all others go to the prefill kernels or, where those do not serve, to the tiles' kernel, which
// walks the chunks in one block of four warps; and once more to that one where the prefill over
// BF16 pages found a NaN, since it alone keeps from a row the values that the row does not see. All
// kernels of a class do the same arithmetic, row by row: over E4M3 pages on Hopper that of
// device/attention_codes.cuh, elsewhere that of device/attention_tile.cuh.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/quantized_rows.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMaxGroup = 16;  // query heads of one key/value head that a warp's rows hold

constexpr int kWarps = 4;
constexpr int kTileRows = 16 * kWarps;  // query rows of a block: tokens × heads of the group
constexpr int kFewBlocks = 32;          // for each key/value head

// Where the tiles of a sequence begin among all blocks: never too close together.
__device__ int first_tile_of(const AttentionProblem& p, int sequence) {
  return p.query_offsets[sequence] * p.group / kTileRows + sequence;
}

// The rows of a tile, counted over all sequences, and of a key/value head.
template <bool kFp8, int kWidth>
__device__ void take_tile(const AttentionProblem& p, int index, int head, char* shared) {
  using Tile = AttentionTile<kFp8, kWidth>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sequence = 0;
  for (int above = p.num_sequences; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    (first_tile_of(p, middle) <= index ? sequence : above) = middle;
  }
  const int first_token = p.query_offsets[sequence];
  const int new_tokens = p.query_offsets[sequence + 1] - first_token;
  const int first_row = (index - first_tile_of(p, sequence)) * kTileRows;
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
    Tile::template clear_unseen<kWarps>(0, limit - tile, base + stage * Tile::kStageBytes, warp,
                                        lane);
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
    Tile::template add_values<true>(at, lane, first, last, scores, state);
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
    const float share = share_of(sum[h]);
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int element = Tile::element_of(n, i, lane);
        if (element < keys.width) {
          const float out = folded[32 * (4 * n + 2 * h + i)];
          store(out * share, to + element);
        }
      }
    }
    if (lane % 4 == 0) write_lse(p, token[h], query_head[h], maximum[h], sum[h]);
  }
}

// Whether the prefill kernel found a NaN. The last block to ask clears the queue for the next call.
__device__ bool prefill_found_nan(PrefillQueue& queue) {
  __shared__ int found;
  if (threadIdx.x == 0) {
    found = queue.found_nan;
    __threadfence();
    const auto blocks = static_cast<int>(gridDim.x * gridDim.y);
    if (atomicAdd(&queue.blocks_read, 1) + 1 == blocks) queue = {};
  }
  __syncthreads();
  return found != 0;
}

template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    tiles_kernel(const __grid_constant__ AttentionProblem p, int num_tiles) {
  extern __shared__ __align__(128) char shared[];
  await_predecessor();
  if (p.prefilled != nullptr && !prefill_found_nan(*p.prefilled)) return;
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles;
       tile += static_cast<int>(gridDim.x)) {
    take_tile<kFp8, kWidth>(p, tile, blockIdx.y, shared);
  }
}

template <bool kFp8, int kWidth>
void launch_tiles(Context& context, const AttentionProblem& p) {
  using Tile = AttentionTile<kFp8, kWidth>;
  constexpr int kSharedBytes = 2 * Tile::kStageBytes + kTileRows * kWidth * 4;
  const auto kernel = tiles_kernel<kFp8, kWidth>;
  static const bool ready = allow_shared(kernel, kSharedBytes);
  (void)ready;
  const int tiles = p.num_tokens * p.group / kTileRows + p.num_sequences;
  // Few blocks where there is most probably nothing to do.
  const int blocks = p.prefilled == nullptr ? tiles : std::min(tiles, kFewBlocks);
  launch("attention", context,
         {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.keys.heads)),
          .num_threads = 32 * kWarps,
          .shared_bytes = kSharedBytes},
         kernel, p, tiles);
}

// Room for the chunks of every sequence.
void take_chunks(Context& context, AttentionProblem& p, int64_t max_context) {
  const int64_t longest =
      max_context > 0 ? max_context : int64_t{p.keys.max_pages} << p.keys.page_shift;
  p.num_chunks = static_cast<int>(divide_up(longest, kChunkKeys));
  const int64_t count = int64_t{p.num_sequences} * p.keys.heads * p.group * p.num_chunks;
  const int64_t values = count * kernel_width(p.keys.width);
  p.chunk_values = context.scratch<float>(kScratchAttention, values + 2 * count);
  p.chunk_stats = reinterpret_cast<float2*>(p.chunk_values + values);
}

}  // namespace

bool attention_codes_serve(const Context& context, const AttentionProblem& p,
                           const ops::KvCacheView& cache) {
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  return cache.k.dtype == DType::kE4M3 && !context.portable() &&
         (p.keys.width == 64 || p.keys.width == 128) && p.group <= kMaxGroup && p.factor > 0 &&
         cache.k.contiguous() && cache.v.contiguous() && cache.k_scale.contiguous() &&
         cache.v_scale.contiguous() && is_aligned(cache.k.data) && is_aligned(cache.v.data) &&
         is_aligned(cache.k_scale.data) && is_aligned(cache.v_scale.data) && is_aligned(p.q) &&
         p.q_stride % 8 == 0;
}

void attention(Context& context, const ops::AttentionArgs& args) {
  constexpr std::string_view kOp = "attention";
  require_cache(kOp, args.cache);
  require_rank(kOp, "q", args.q, 3, 3);
  require_dtype(kOp, "q", args.q, {DType::kBF16});
  require_like(kOp, "out", args.out, args.q);
  const int64_t num_tokens = args.q.shape[0], num_heads = args.q.shape[1], width = args.q.shape[2];
  const int64_t kv_heads = args.cache.num_heads(), page_size = args.cache.page_size();
  if (num_heads < 1 || num_heads % kv_heads != 0 || width != args.cache.k.shape[3]) {
    fail(kOp, "q {} does not fit {} key/value heads of width {}", args.q.shape.to_string(),
         kv_heads, args.cache.k.shape[3]);
  }
  const bool fp8 = args.cache.k.dtype == DType::kE4M3;
  if (width % (fp8 ? 16 : 8) != 0) {
    fail(kOp, "on CUDA the head width must be a multiple of {} with this cache, but is {}",
         fp8 ? 16 : 8, width);
  }
  if ((page_size & (page_size - 1)) != 0 || page_size < 8) {
    fail(kOp, "on CUDA the page size must be a power of two from 8 up, but is {}", page_size);
  }
  if (reinterpret_cast<uintptr_t>(args.out.data) % 16 != 0 || args.out.row_stride % 8 != 0) {
    fail(kOp,
         "on CUDA out must begin at a multiple of 16 bytes and have rows a multiple of 8 elements "
         "apart, but they are {} apart",
         args.out.row_stride);
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

  AttentionProblem p{};
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
  p.keys.num_pages = static_cast<int>(args.cache.k.shape[0]);
  p.keys.max_pages = static_cast<int>(args.batch.page_table.shape[1]);
  p.keys.heads = static_cast<int>(kv_heads);
  p.keys.width = static_cast<int>(width);
  p.table_stride = args.batch.page_table.row_stride;
  p.query_offsets = args.batch.query_offsets.as<int32_t>();
  p.context_lengths = args.batch.context_lengths.as<int32_t>();
  p.num_sequences = static_cast<int>(num_sequences);
  p.group = static_cast<int>(num_heads / kv_heads);
  p.window = static_cast<int>(std::min<int64_t>(args.window, 1 << 30));
  p.factor = args.scale * kLog2E;
  p.num_tokens = static_cast<int>(num_tokens);
  p.chunked = p.group <= kMaxGroup;
  const bool all_chunked = p.chunked && args.batch.max_query_tokens == 1;
  if (all_chunked && p.window == 0 && args.batch.max_shared_pages > 0) {
    require_vector(kOp, "shared_first", args.batch.shared_first, DType::kI32, num_sequences);
    require_vector(kOp, "shared_pages", args.batch.shared_pages, DType::kI32, num_sequences);
    p.shared_first = args.batch.shared_first.as<int32_t>();
    p.shared_pages = args.batch.shared_pages.as<int32_t>();
  }
  const bool fused = all_chunked && attention_fold_quantizes(p, args.quantized);
  if (fused && !args.quantized.keep_dense) p.out = nullptr;
  if (p.chunked && args.batch.min_query_tokens <= 1) {
    take_chunks(context, p, args.batch.max_context);
    if (attention_codes_serve(context, p, args.cache)) {
      attention_decode_codes(context, p, args.cache);
    } else if (!attention_decode(context, p, args.cache)) {
      attention_chunks(context, p, fp8);
    }
    attention_fold(context, p, fused ? quantized_rows(context, args.quantized) : QuantizedRows{});
  }
  if (!all_chunked && attention_codes_serve(context, p, args.cache)) {
    attention_prefill_codes(context, p, args.cache);
  } else if (!all_chunked) {
    if (!fp8) attention_prefill(context, p);
    with_kernel_types(fp8, width, [&](auto kernel_fp8, auto kernel_width) {
      launch_tiles<decltype(kernel_fp8)::value, decltype(kernel_width)::value>(context, p);
    });
  }
  if (!fused && !args.quantized.empty()) {
    quantize(context, {.x = args.out.reshaped(args.quantized.out.codes.shape),
                       .column_scale = {},
                       .out = args.quantized.out,
                       .scale_format = args.quantized.scale_format});
  }
}

}  // namespace octet::cuda
