// The product on the matrix units that every device from compute capability 8.9 on has: a warp's
// mma.sync on operands in shared memory. Weights are the wide operand, tokens the narrow one. Its
// BF16 rows are, byte for byte, those of product.cu; its 8-bit rows are a class of their own, since
// the units sum a step of 32 in their own way.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/product_pieces.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

enum class Inputs { kBF16, kE4M3, kE5M2 };  // of x; weights are BF16 or E4M3

// A block's work: kRowWarps × kTokenWarps warps, each with kRowTiles × 16 rows of the weight and
// kTokenTiles × 8 tokens.
template <int kRowWarps_, int kTokenWarps_, int kRowTiles_, int kTokenTiles_, int kStages_>
struct Shape {
  static constexpr int kRowWarps = kRowWarps_, kTokenWarps = kTokenWarps_;
  static constexpr int kRowTiles = kRowTiles_, kTokenTiles = kTokenTiles_, kStages = kStages_;
  static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
  static constexpr int kRows = 16 * kRowTiles * kRowWarps;
  static constexpr int kTokens = 8 * kTokenTiles * kTokenWarps;
  static constexpr int kWeightBytes = kRows * kChunkBytes;
  static constexpr int kScalesAt = kWeightBytes + kTokens * kChunkBytes;
  static constexpr int kStageBytes = kScalesAt + kTokens * 4;  // weights, tokens, tokens' scales
};

template <Inputs kInputs>
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kInputs == Inputs::kBF16) {
    mma_16x8x16<false>(c, a, b0, b1);
  } else {
    mma_16x8x32<kInputs == Inputs::kE5M2>(c, a, b0, b1);
  }
}

template <ProductFormat kFormat, Inputs kInputs, class S>
__global__ void __launch_bounds__(S::kThreads)
    portable_kernel(const __grid_constant__ Tiles tiles) {
  constexpr bool kBlocks = kFormat == ProductFormat::kBlocks;
  constexpr int kRowTiles = S::kRowTiles, kTokenTiles = S::kTokenTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t base = shared_address(shared);
  const Product& p = tiles.p;

  const int part = weight_of_block(tiles);
  const ProductWeight& weight = p.weights[part];
  const int64_t first_row =
      int64_t{static_cast<int>(blockIdx.y) - tiles.first_tile[part]} * S::kRows;
  const int64_t first_token = int64_t{blockIdx.x} * S::kTokens;
  const int64_t element_bytes = kInputs == Inputs::kBF16 ? 2 : 1;
  const auto load_stage = [&](int chunk) {
    const uint32_t stage = base + chunk % S::kStages * S::kStageBytes;
    if (kBlocks && threadIdx.x < S::kTokens) {
      const int64_t t = first_token + threadIdx.x;
      const bool inside = t < p.num_tokens;
      copy_async_4(stage + S::kScalesAt + threadIdx.x * 4,
                   p.x_scales + (inside ? t * p.x_scale_stride + chunk : 0), inside);
    }
    load_tile<S::kRows, S::kThreads>(static_cast<const char*>(weight.data),
                                     weight.stride * element_bytes, first_row, weight.rows, chunk,
                                     tiles.depth_bytes, stage);
    const auto* x = static_cast<const char*>(p.x) + weight.x_offset * element_bytes;
    load_tile<S::kTokens, S::kThreads>(x, p.x_stride * element_bytes, first_token, p.num_tokens,
                                       chunk, tiles.depth_bytes, stage + S::kWeightBytes);
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % S::kRowWarps * 16 * kRowTiles;
  const int warp_token = warp / S::kRowWarps * 8 * kTokenTiles;
  const int64_t row = first_row + warp_row + lane / 4;  // + 16 i + 8 h
  const int token = warp_token + lane % 4 * 2;          // of the block, + 8 j + e
  float acc[kRowTiles][kTokenTiles][4] = {};
  [[maybe_unused]] const float* w_scales[kRowTiles][2];
  if constexpr (kBlocks) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto r = static_cast<int>(min(row + 16 * i + 8 * h, weight.rows - 1));
        w_scales[i][h] = weight.scales + r / weight.row_block * weight.scale_stride;
      }
    }
  }

#pragma unroll
  for (int chunk = 0; chunk < S::kStages - 1; ++chunk) {
    if (chunk < tiles.num_chunks) load_stage(chunk);
    copy_async_commit();
  }
  for (int chunk = 0; chunk < tiles.num_chunks; ++chunk) {
    [[maybe_unused]] float w_scale[kRowTiles][2];
    if constexpr (kBlocks) {  // asked for before the wait
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) w_scale[i][h] = w_scales[i][h][chunk * weight.chunk_stride];
      }
    }
    copy_async_wait<S::kStages - 2>();
    __syncthreads();  // this chunk has landed, and everyone is done with the one before
    if (chunk + S::kStages - 1 < tiles.num_chunks) load_stage(chunk + S::kStages - 1);
    copy_async_commit();

    const int at = chunk % S::kStages * S::kStageBytes;
    uint32_t a[kRowTiles][kChunkSteps][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) {
        load_pieces(base + at, warp_row + 16 * i + lane % 16, 2 * step + lane / 16, a[i][step]);
      }
    }
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      uint32_t b[kChunkSteps / 2][4];
#pragma unroll
      for (int pair = 0; pair < kChunkSteps / 2; ++pair) {
        load_pieces(base + at + S::kWeightBytes, warp_token + 8 * j + lane % 8, 4 * pair + lane / 8,
                    b[pair]);
      }
      [[maybe_unused]] float2 x_scale;
      if constexpr (kBlocks) {
        x_scale =
            *reinterpret_cast<const float2*>(shared + at + S::kScalesAt + (token + 8 * j) * 4);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        float(&sum)[4] = acc[i][j];
        if constexpr (kFormat == ProductFormat::kBF16) {
#pragma unroll
          for (int step = 0; step < kChunkSteps; ++step) {
            const uint32_t* pieces = b[step / 2] + 2 * (step % 2);
            multiply<kInputs>(sum, a[i][step], pieces[0], pieces[1]);
          }
        } else {
          float partial[4] = {};
#pragma unroll
          for (int step = 0; step < kChunkSteps; ++step) {
            const uint32_t* pieces = b[step / 2] + 2 * (step % 2);
            multiply<kInputs>(partial, a[i][step], pieces[0], pieces[1]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if constexpr (kBlocks) {
              const float scale = (e % 2 == 0 ? x_scale.x : x_scale.y) * w_scale[i][e / 2];
              sum[e] = fmaf(partial[e], scale, sum[e]);
            } else {
              sum[e] += partial[e];
            }
          }
        }
      }
    }
  }

  const FloatArray y{p.y, p.y_is_bf16}, bias{const_cast<void*>(p.bias), p.bias_is_bf16};
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t r = row + 16 * i + 8 * h;
      if (r >= weight.rows) continue;
      const int64_t column = tiles.first_column[part] + r;
      const float w_scale =
          kFormat == ProductFormat::kScaled ? weight.scales[r * weight.scale_stride] : 1.0f;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t t = first_token + token + 8 * j + e;
          if (t >= p.num_tokens) continue;
          float value = acc[i][j][2 * h + e];
          if constexpr (kFormat == ProductFormat::kScaled) {
            value = value * w_scale * p.x_scales[t * p.x_scale_stride];
          }
          value *= p.alpha;
          if (p.bias != nullptr) value += bias.get(column);
          const int64_t to = t * p.y_stride + column;
          if (p.accumulate) value += y.get(to);
          y.set(to, value);
        }
      }
    }
  }
}

template <ProductFormat kFormat, Inputs kInputs, class S>
void launch(Context& context, Tiles& tiles) {
  constexpr int kSharedBytes = S::kStages * S::kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024, "what a block of compute capability 8.9 has");
  const auto kernel = portable_kernel<kFormat, kInputs, S>;
  static const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check(status, "linear");
  const int row_tiles = place_tiles(tiles, S::kRows);
  const dim3 grid(static_cast<unsigned>(divide_up(tiles.p.num_tokens, S::kTokens)),
                  static_cast<unsigned>(row_tiles));
  kernel<<<grid, S::kThreads, kSharedBytes, context.stream()>>>(tiles);
  check_launch("linear");
}

// Which shape serves has no part in the bytes.
template <ProductFormat kFormat, Inputs kInputs>
void launch_any(Context& context, Tiles& tiles) {
  const int64_t tokens = tiles.p.num_tokens;
  if (tokens <= 16) return launch<kFormat, kInputs, Shape<4, 1, 1, 2, 8>>(context, tiles);
  if (tokens <= 256) return launch<kFormat, kInputs, Shape<2, 2, 2, 4, 4>>(context, tiles);
  return launch<kFormat, kInputs, Shape<4, 2, 2, 8, 3>>(context, tiles);
}

}  // namespace

void run_portable_product(Context& context, const Product& product) {
  if (product.num_tokens == 0) return;
  Tiles tiles = tiles_of(product);
  with_product_types(product, [&](auto format, auto is_e5m2) {
    constexpr ProductFormat kFormat = decltype(format)::value;
    constexpr Inputs kInputs = kFormat == ProductFormat::kBF16 ? Inputs::kBF16
                               : decltype(is_e5m2)::value      ? Inputs::kE5M2
                                                               : Inputs::kE4M3;
    launch_any<kFormat, kInputs>(context, tiles);
  });
}

}  // namespace octet::cuda
