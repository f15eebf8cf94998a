// Own product on Hopper's matrix units: weights are the wide operand (64 or 128 rows to a block),
// tokens the narrow one, so that one token costs no more than eight.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/wgmma.cuh"
#include "backend/cuda/product.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kChunkBytes = 128;  // of K, one row of a tile in shared memory

// The product in units of bytes and tiles, as the kernel reads it.
struct Tiles {
  Product p;
  int first_tile[Product::kMaxWeights];    // of a weight, in blocks of rows
  int first_column[Product::kMaxWeights];  // of a weight, in y
  int depth_bytes, num_chunks;
};

// kRows rows of `data` from `first`, chunk `chunk`, into a tile; zeros beyond the last row and K.
template <int kRows, int kThreads>
__device__ void load_tile(const char* data, int64_t stride_bytes, int64_t first, int64_t num_rows,
                          int chunk, int depth_bytes, uint32_t tile) {
#pragma unroll
  for (int i = 0; i < (kRows * 8 + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * 8 % kThreads != 0 && index >= kRows * 8) break;
    const int row = index / 8, piece = index % 8;
    const int at = chunk * kChunkBytes + piece * 16;
    const bool inside = first + row < num_rows && at < depth_bytes;
    const char* from = inside ? data + (first + row) * stride_bytes + at : data;
    copy_async_16(tile + row * kChunkBytes + ((piece ^ row % 8) << 4), from, inside);
  }
}

template <ProductFormat kFormat, Operands kOperands, int kRows, int kTokens, int kStages>
__global__ void __launch_bounds__(kRows * 2) product_kernel(const __grid_constant__ Tiles tiles) {
  constexpr int kThreads = kRows * 2;  // a warpgroup for 64 rows
  constexpr int kRegisters = kTokens / 2;
  constexpr uint32_t kWeightBytes = kRows * kChunkBytes;
  constexpr uint32_t kStageBytes = kWeightBytes + kTokens * kChunkBytes;
  extern __shared__ char shared[];
  const uint32_t base = (shared_address(shared) + 1023u) & ~1023u;
  const char* aligned = shared + (base - shared_address(shared));
  const Product& p = tiles.p;

  int part = 0;
  while (part + 1 < p.num_weights && static_cast<int>(blockIdx.y) >= tiles.first_tile[part + 1]) {
    ++part;
  }
  const ProductWeight& weight = p.weights[part];
  const int64_t first_row = int64_t{static_cast<int>(blockIdx.y) - tiles.first_tile[part]} * kRows;
  const int64_t first_token = int64_t{blockIdx.x} * kTokens;
  const int64_t element_bytes = kFormat == ProductFormat::kBF16 ? 2 : 1;
  const auto* w = static_cast<const char*>(weight.data);
  const auto* x = static_cast<const char*>(p.x);
  // After the stages: the block scales of each stage's tokens.
  const uint32_t scales_at = kStages * kStageBytes;
  const auto load_stage = [&](int chunk) {
    const uint32_t stage = base + chunk % kStages * kStageBytes;
    if constexpr (kFormat == ProductFormat::kBlocks) {
      const int64_t t = first_token + threadIdx.x;
      if (threadIdx.x < kTokens) {
        const bool inside = t < p.num_tokens;
        copy_async_4(base + scales_at + (chunk % kStages * kTokens + threadIdx.x) * 4,
                     p.x_scales + (inside ? t * p.x_scale_stride + chunk : 0), inside);
      }
    }
    load_tile<kRows, kThreads>(w, weight.stride * element_bytes, first_row, weight.rows, chunk,
                               tiles.depth_bytes, stage);
    load_tile<kTokens, kThreads>(x, p.x_stride * element_bytes, first_token, p.num_tokens, chunk,
                                 tiles.depth_bytes, stage + kWeightBytes);
  };

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int64_t row = first_row + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int64_t token = first_token + thread % 4 * 2;
  float acc[kRegisters], partial[kFormat == ProductFormat::kBF16 ? 1 : kRegisters];
#pragma unroll
  for (float& value : acc) value = 0;
  [[maybe_unused]] const float* w_scales[2] = {nullptr, nullptr};  // of the thread's two rows
  if constexpr (kFormat == ProductFormat::kBlocks) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto r = static_cast<int>(min(row + 8 * h, weight.rows - 1));
      w_scales[h] = weight.scales + r / weight.row_block * weight.scale_stride;
    }
  }

#pragma unroll
  for (int chunk = 0; chunk < kStages - 1; ++chunk) {
    if (chunk < tiles.num_chunks) load_stage(chunk);
    copy_async_commit();
  }
  for (int chunk = 0; chunk < tiles.num_chunks; ++chunk) {
    // Block scales are asked for before the wait.
    float w_scale[2] = {0, 0};
    if constexpr (kFormat == ProductFormat::kBlocks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w_scale[h] = w_scales[h][chunk * weight.chunk_stride];
      }
    }
    copy_async_wait<kStages - 2>();
    fence_async_proxy();
    __syncthreads();  // this chunk has landed, and the products of the one before are done
    const uint32_t stage = base + chunk % kStages * kStageBytes;
    const uint64_t a = wgmma_descriptor(stage + group * 64 * kChunkBytes);
    const uint64_t b = wgmma_descriptor(stage + kWeightBytes);
    wgmma_fence();
    if constexpr (kFormat == ProductFormat::kBF16) {
      wgmma_hold(acc);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Wgmma<kTokens>::template run<kOperands>(acc, a + 2 * k, b + 2 * k, true);
    } else {
      wgmma_hold(partial);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<kTokens>::template run<kOperands>(partial, a + 2 * k, b + 2 * k, k > 0);
      }
    }
    wgmma_commit();
    if (chunk + kStages - 1 < tiles.num_chunks) load_stage(chunk + kStages - 1);
    copy_async_commit();
    wgmma_wait<0>();
    if constexpr (kFormat == ProductFormat::kBF16) {
      wgmma_hold(acc);
    } else {
      wgmma_hold(partial);
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        float x_scale[2] = {1, 1};
        if constexpr (kFormat == ProductFormat::kBlocks) {
          const float2 pair = *reinterpret_cast<const float2*>(
              aligned + scales_at + (chunk % kStages * kTokens + 8 * j + thread % 4 * 2) * 4);
          x_scale[0] = pair.x;
          x_scale[1] = pair.y;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kFormat == ProductFormat::kBlocks) {
            acc[4 * j + e] =
                fmaf(partial[4 * j + e], x_scale[e % 2] * w_scale[e / 2], acc[4 * j + e]);
          } else {
            acc[4 * j + e] += partial[4 * j + e];
          }
        }
      }
    }
  }

  const FloatArray y{p.y, p.y_is_bf16}, bias{const_cast<void*>(p.bias), p.bias_is_bf16};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t r = row + 8 * h;
    if (r >= weight.rows) continue;
    const int64_t column = tiles.first_column[part] + r;
    const float w_scale =
        kFormat == ProductFormat::kScaled ? weight.scales[r * weight.scale_stride] : 1.0f;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t t = token + 8 * j + i;
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

template <ProductFormat kFormat, Operands kOperands, int kRows, int kTokens, int kStages>
void launch(Context& context, Tiles& tiles) {
  constexpr int kSharedBytes = kStages * ((kRows + kTokens) * kChunkBytes +
                                          (kFormat == ProductFormat::kBlocks ? kTokens * 4 : 0)) +
                               1024;
  const auto kernel = product_kernel<kFormat, kOperands, kRows, kTokens, kStages>;
  static const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check(status, "linear");
  int row_tiles = 0, column = 0;
  for (int i = 0; i < tiles.p.num_weights; ++i) {
    tiles.first_tile[i] = row_tiles;
    tiles.first_column[i] = column;
    row_tiles += static_cast<int>(divide_up(tiles.p.weights[i].rows, kRows));
    column += static_cast<int>(tiles.p.weights[i].rows);
  }
  const dim3 grid(static_cast<unsigned>(divide_up(tiles.p.num_tokens, kTokens)),
                  static_cast<unsigned>(row_tiles));
  kernel<<<grid, kRows * 2, kSharedBytes, context.stream()>>>(tiles);
  check_launch("linear");
}

// Which tile serves has no part in the bytes.
template <ProductFormat kFormat, Operands kOperands>
void launch_any(Context& context, Tiles& tiles) {
  const int64_t tokens = tiles.p.num_tokens;
  if (tokens <= 8) return launch<kFormat, kOperands, 64, 8, 10>(context, tiles);
  if (tokens <= 16) return launch<kFormat, kOperands, 64, 16, 10>(context, tiles);
  if (tokens <= 32) return launch<kFormat, kOperands, 64, 32, 8>(context, tiles);
  if (tokens <= 256) return launch<kFormat, kOperands, 64, 64, 6>(context, tiles);
  return launch<kFormat, kOperands, 128, 128, 6>(context, tiles);
}

}  // namespace

void run_own_product(Context& context, const Product& product) {
  if (product.num_tokens == 0) return;
  if (context.portable()) return run_portable_product(context, product);
  Tiles tiles{};
  tiles.p = product;
  const int64_t element_bytes = product.format == ProductFormat::kBF16 ? 2 : 1;
  tiles.depth_bytes = static_cast<int>(round_up(product.depth * element_bytes, 16));
  tiles.num_chunks = static_cast<int>(divide_up(tiles.depth_bytes, kChunkBytes));
  switch (product.format) {
    case ProductFormat::kBF16:
      return launch_any<ProductFormat::kBF16, Operands::kBF16>(context, tiles);
    case ProductFormat::kScaled:
      return product.x_is_e5m2
                 ? launch_any<ProductFormat::kScaled, Operands::kE4M3xE5M2>(context, tiles)
                 : launch_any<ProductFormat::kScaled, Operands::kE4M3>(context, tiles);
    case ProductFormat::kBlocks:
      return product.x_is_e5m2
                 ? launch_any<ProductFormat::kBlocks, Operands::kE4M3xE5M2>(context, tiles)
                 : launch_any<ProductFormat::kBlocks, Operands::kE4M3>(context, tiles);
  }
}

}  // namespace octet::cuda
