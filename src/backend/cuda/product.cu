// Own product on Hopper's matrix units: weights are the wide operand (64 or 128 rows to a block),
// tokens the narrow one, so that one token costs no more than eight.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/mbarrier.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/wgmma.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_tiles.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

// kRows rows of `data` from `first`, kChunks chunks from `chunk`, into tiles one after another;
// zeros beyond the last row and K.
template <int kRows, int kChunks, int kThreads>
__device__ void load_tiles(const char* data, int64_t stride_bytes, int64_t first, int64_t num_rows,
                           int chunk, int depth_bytes, uint32_t tiles) {
  constexpr int kPieces = kChunks * 8;  // of 16 bytes, of one row
#pragma unroll
  for (int i = 0; i < (kRows * kPieces + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * kPieces % kThreads != 0 && index >= kRows * kPieces) break;
    const int row = index / kPieces, piece = index % kPieces;
    const int at = chunk * kChunkBytes + piece * 16;
    const bool inside = first + row < num_rows && at < depth_bytes;
    // What is not read is another row's, not the same place for all.
    const char* from =
        data + min(first + row, num_rows - 1) * stride_bytes + (at < depth_bytes ? at : 0);
    copy_async_16(tiles + (piece / 8 * kRows + row) * kChunkBytes + ((piece % 8 ^ row % 8) << 4),
                  from, inside);
  }
}

constexpr int threads_of(int rows) { return rows > 64 ? 256 : 128; }  // a warpgroup for 64 rows

// A tile of a kernel: kRows of the weights (of 64, the matrix units' least, those beyond kRows are
// some other bytes and their results unused), kTokens, and stages of kChunks chunks of K.
template <ProductFormat kFormat, int kRows, int kTokens, int kChunks, int kStages>
struct Layout {
  static constexpr uint32_t kWeightBytes = kChunks * kRows * kChunkBytes;
  static constexpr uint32_t kStageBytes = kWeightBytes + kChunks * kTokens * kChunkBytes;
  // Block scales of a stage: [kChunks, kRows] of the weights, [kChunks, kTokens] of the tokens.
  static constexpr int kScales =
      kFormat == ProductFormat::kBlocks ? kChunks * (kRows + kTokens) : 0;
  static constexpr int kSharedBytes =
      kStages * (static_cast<int>(kStageBytes) + 4 * kScales) + 1024;
  static_assert(kRows % 8 == 0 && (kRows >= 64 || kTokens * kChunks + kRows >= 64));
};

template <ProductFormat kFormat, Operands kOperands, int kRows, int kTokens, int kChunks,
          int kStages>
__global__ void __launch_bounds__(threads_of(kRows))
    product_kernel(const __grid_constant__ Tiles tiles) {
  using L = Layout<kFormat, kRows, kTokens, kChunks, kStages>;
  constexpr int kThreads = threads_of(kRows), kRegisters = kTokens / 2;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[kStages];
  const uint32_t base = (shared_address(shared) + 1023u) & ~1023u;
  const uint32_t full = shared_address(barriers);
  if (threadIdx.x < kStages) barrier_init(full + 8 * threadIdx.x, 2 * kThreads);
  __syncthreads();
  const Product& p = tiles.p;

  const int part = weight_of_block(tiles);
  const ProductWeight& weight = p.weights[part];
  const int64_t first_row = int64_t{static_cast<int>(blockIdx.y) - tiles.first_tile[part]} * kRows;
  const int64_t first_token = int64_t{blockIdx.x} * kTokens;
  const int64_t element_bytes = kFormat == ProductFormat::kBF16 ? 2 : 1;
  const auto* w = static_cast<const char*>(weight.data);
  const auto* x = static_cast<const char*>(p.x) + weight.x_offset * element_bytes;
  const uint32_t scales_at = kStages * L::kStageBytes;  // behind the stages
  const auto* scales =
      reinterpret_cast<const float*>(shared + (base - shared_address(shared)) + scales_at);
  // Where this thread's block scales of chunk 0 are, and how far those of the next.
  constexpr int kScaleLoads = (L::kScales + kThreads - 1) / kThreads;
  [[maybe_unused]] const float* scale_from[kScaleLoads + 1];
  [[maybe_unused]] int64_t scale_step[kScaleLoads + 1];
  [[maybe_unused]] int scale_chunk[kScaleLoads + 1];  // of the stage; huge: none
#pragma unroll
  for (int j = 0; j < kScaleLoads; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    const bool of_weight = i < kChunks * kRows;
    const int at = of_weight ? i : i - kChunks * kRows;
    const int64_t r = of_weight ? first_row + at % kRows : first_token + at % kTokens;
    const bool inside = i < L::kScales && r < (of_weight ? weight.rows : p.num_tokens);
    scale_chunk[j] = inside ? at / (of_weight ? kRows : kTokens) : 1 << 30;
    scale_step[j] = of_weight ? weight.chunk_stride : 1;
    scale_from[j] = !inside     ? weight.scales
                    : of_weight ? weight.scales + r / weight.row_block * weight.scale_stride
                                : p.x_scales + r * p.x_scale_stride;
  }
  // A stage is full when every thread's copies of its weights and of its tokens have come.
  const auto load = [&](auto weights, int index) {
    constexpr bool kWeights = decltype(weights)::value;
    const int slot = index % kStages, chunk = index * kChunks;
#pragma unroll
    for (int j = 0; j < kScaleLoads; ++j) {
      const int i = j * kThreads + static_cast<int>(threadIdx.x);
      const int c = chunk + scale_chunk[j];
      const bool inside = c < tiles.num_chunks;
      if (i < L::kScales && (i < kChunks * kRows) == kWeights) {
        copy_async_4(base + scales_at + (slot * L::kScales + i) * 4,
                     scale_from[j] + (inside ? c * scale_step[j] : 0), inside);
      }
    }
    const uint32_t stage = base + slot * L::kStageBytes;
    if constexpr (kWeights) {
      load_tiles<kRows, kChunks, kThreads>(w, weight.stride * element_bytes, first_row, weight.rows,
                                           chunk, tiles.depth_bytes, stage);
    } else {
      load_tiles<kTokens, kChunks, kThreads>(x, p.x_stride * element_bytes, first_token,
                                             p.num_tokens, chunk, tiles.depth_bytes,
                                             stage + L::kWeightBytes);
    }
    barrier_arrive_after_copies(full + 8 * slot);
  };

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int tile_row = group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int tile_token = thread % 4 * 2;
  float acc[kRegisters], partial[kFormat == ProductFormat::kBF16 ? 1 : kChunks * kRegisters];
#pragma unroll
  for (float& value : acc) value = 0;

  const int num_stages = (tiles.num_chunks + kChunks - 1) / kChunks;
  const int num_ahead = min(num_stages, kStages - 1);
  if (!p.settled) await_predecessor();
  for (int index = 0; index < num_ahead; ++index) load(std::true_type(), index);
  if (p.settled) await_predecessor();
  for (int index = 0; index < num_ahead; ++index) load(std::false_type(), index);
  for (int index = 0; index < num_stages; ++index) {
    barrier_wait(full + 8 * (index % kStages), static_cast<uint32_t>(index / kStages) & 1);
    fence_async_proxy();
    __syncthreads();  // everyone is here, and the products of the stage before are done
    const int slot = index % kStages;
    const uint32_t stage = base + slot * L::kStageBytes;
    wgmma_fence();
    if constexpr (kFormat == ProductFormat::kBF16) {
      wgmma_hold(acc);
    } else {
      wgmma_hold(partial);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint64_t a = wgmma_descriptor(stage + (c * kRows + group * 64) * kChunkBytes);
      const uint64_t b = wgmma_descriptor(stage + L::kWeightBytes + c * kTokens * kChunkBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kFormat == ProductFormat::kBF16) {
          Wgmma<kTokens>::template run<kOperands>(acc, a + 2 * k, b + 2 * k, true);
        } else {
          // Every chunk's partial sum starts from zero.
          auto& sum = *reinterpret_cast<float(*)[kRegisters]>(partial + c * kRegisters);
          Wgmma<kTokens>::template run<kOperands>(sum, a + 2 * k, b + 2 * k, k > 0);
        }
      }
    }
    wgmma_commit();
    if (const int next = index + kStages - 1; next < num_stages) {
      load(std::true_type(), next);
      load(std::false_type(), next);
    }
    wgmma_wait<0>();
    if constexpr (kFormat == ProductFormat::kBF16) {
      wgmma_hold(acc);
    } else {
      wgmma_hold(partial);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        [[maybe_unused]] const float* w_scales = scales + slot * L::kScales + c * kRows;
        [[maybe_unused]] const float* x_scales =
            scales + slot * L::kScales + kChunks * kRows + c * kTokens;
        [[maybe_unused]] float w_scale[2] = {1, 1};
        if constexpr (kFormat == ProductFormat::kBlocks) {
          w_scale[0] = w_scales[kRows < 64 ? min(tile_row, kRows - 1) : tile_row];
          w_scale[1] = w_scales[kRows < 64 ? min(tile_row + 8, kRows - 1) : tile_row + 8];
        }
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
          [[maybe_unused]] float2 x_scale{1, 1};
          if constexpr (kFormat == ProductFormat::kBlocks) {
            x_scale = *reinterpret_cast<const float2*>(x_scales + 8 * j + tile_token);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float part_sum = partial[c * kRegisters + 4 * j + e];
            if constexpr (kFormat == ProductFormat::kBlocks) {
              acc[4 * j + e] = fmaf(part_sum, (e % 2 == 0 ? x_scale.x : x_scale.y) * w_scale[e / 2],
                                    acc[4 * j + e]);
            } else {
              acc[4 * j + e] += part_sum;
            }
          }
        }
      }
    }
  }

  const FloatArray y{p.y, p.y_is_bf16}, bias{const_cast<void*>(p.bias), p.bias_is_bf16};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t r = first_row + tile_row + 8 * h;
    if (tile_row + 8 * h >= kRows || r >= weight.rows) continue;
    const int64_t column = tiles.first_column[part] + r;
    const float w_scale =
        kFormat == ProductFormat::kScaled ? weight.scales[r * weight.scale_stride] : 1.0f;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t t = first_token + tile_token + 8 * j + i;
        if (t >= p.num_tokens) continue;
        float value = acc[4 * j + 2 * h + i];
        if constexpr (kFormat == ProductFormat::kScaled) {
          value = value * w_scale * p.x_scales[t * p.x_scale_stride];
        }
        value *= p.alpha;
        if (p.bias != nullptr) value += bias.get(column);
        const int64_t at = t * p.y_stride + column;
        if (p.accumulate) value += y.get(at);
        y.set(at, value);
      }
    }
  }
}

template <ProductFormat kFormat, Operands kOperands, int kRows, int kTokens, int kChunks,
          int kStages>
void launch(Context& context, Tiles& tiles) {
  using L = Layout<kFormat, kRows, kTokens, kChunks, kStages>;
  const auto kernel = product_kernel<kFormat, kOperands, kRows, kTokens, kChunks, kStages>;
  static const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSharedBytes);
  check(status, "linear");
  const int row_tiles = place_tiles(tiles, kRows);
  const dim3 grid(static_cast<unsigned>(divide_up(tiles.p.num_tokens, kTokens)),
                  static_cast<unsigned>(row_tiles));
  octet::cuda::launch(
      "linear", context,
      {.grid = grid, .num_threads = threads_of(kRows), .shared_bytes = L::kSharedBytes}, kernel,
      tiles);
}

// With as many stages as kBytes hold: what a multiprocessor may ask for ahead of time.
template <ProductFormat kFormat, Operands kOperands, int kRows, int kTokens, int kChunks,
          int kBytes>
void launch_deep(Context& context, Tiles& tiles) {
  constexpr int kStageBytes = Layout<kFormat, kRows, kTokens, kChunks, 1>::kSharedBytes - 1024;
  launch<kFormat, kOperands, kRows, kTokens, kChunks, kBytes / kStageBytes>(context, tiles);
}

// Few tokens: the narrowest strips of the weights that give every multiprocessor one, with long
// stages; or, of many rows, three strips at a time.
template <ProductFormat kFormat, Operands kOperands, int kTokens>
void launch_strips(Context& context, Tiles& tiles) {
  constexpr int kChunks = kTokens <= 32 ? 4 : 2;
  constexpr int kWhole = 192 * 1024, kThird = 74 * 1024;  // of a multiprocessor's shared memory
  int64_t rows = 0;
  for (int i = 0; i < tiles.p.num_weights; ++i) rows += tiles.p.weights[i].rows;
  const int64_t share = divide_up(rows, context.num_multiprocessors());
  if (share <= 32) {
    launch_deep<kFormat, kOperands, 32, kTokens, kChunks, kWhole>(context, tiles);
  } else if (share <= 48) {
    launch_deep<kFormat, kOperands, 48, kTokens, kChunks, kWhole>(context, tiles);
  } else {
    launch_deep<kFormat, kOperands, 64, kTokens, kChunks / 2, kThird>(context, tiles);
  }
}

// Which tile serves has no part in the bytes.
template <ProductFormat kFormat, Operands kOperands>
void launch_any(Context& context, Tiles& tiles) {
  const int64_t tokens = tiles.p.num_tokens;
  if (tokens <= 8) return launch_strips<kFormat, kOperands, 8>(context, tiles);
  if (tokens <= 16) return launch_strips<kFormat, kOperands, 16>(context, tiles);
  if (tokens <= 32) return launch_strips<kFormat, kOperands, 32>(context, tiles);
  if (tokens <= 64) return launch_strips<kFormat, kOperands, 64>(context, tiles);
  if (tokens <= 256) return launch<kFormat, kOperands, 64, 64, 1, 6>(context, tiles);
  return launch<kFormat, kOperands, 128, 128, 1, 6>(context, tiles);
}

}  // namespace

void run_own_product(Context& context, const Product& product) {
  if (product.num_tokens == 0) return;
  if (context.portable()) return run_portable_product(context, product);
  if (run_wide_product(context, product)) return;
  Tiles tiles = tiles_of(product);
  with_product_types(product, [&](auto format, auto is_e5m2) {
    constexpr ProductFormat kFormat = decltype(format)::value;
    constexpr Operands kOperands = kFormat == ProductFormat::kBF16 ? Operands::kBF16
                                   : decltype(is_e5m2)::value      ? Operands::kE4M3xE5M2
                                                                   : Operands::kE4M3;
    launch_any<kFormat, kOperands>(context, tiles);
  });
}

}  // namespace octet::cuda
