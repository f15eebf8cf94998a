// Own product of 8-bit codes on Hopper for up to 1,024 tokens. Tokens are the matrix units' wide
// operand, 64 to a warpgroup, however few there are; a warpgroup's warps bring tiles of both
// operands by the tensor memory accelerator, and a block goes from tile to tile of the result.
#include <algorithm>
#include <span>

#include "backend/cuda/device/async_copy.cuh"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/device/mbarrier.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"
#include "backend/cuda/device/wgmma_codes.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_tiles.h"
#include "backend/cuda/status.h"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

constexpr int64_t kFewTokens = 64, kManyTokens = 1024;  // at most
constexpr int kScaleBlock = 128;                        // rows of a weight with one block scale
constexpr int kFour = 4;                                // chunks whose block scales come at once

// Of a thread, where there are two groups; 168 at the start.
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;

// A tile of the result: 64 tokens for each of kGroups warpgroups times kRows rows of the weight.
// A stage is one chunk of K of both operands; kTogether chunks are multiplied without a pause.
template <ProductFormat kFormat, int kGroups_, int kRows_, int kTogether_ = 1>
struct WideTile {
  static constexpr bool kBlocks = kFormat == ProductFormat::kBlocks;
  static constexpr int kGroups = kGroups_, kRows = kRows_, kTokens = 64 * kGroups;
  static constexpr int kTogether = kTogether_;
  // Warps. One keeps up with two warpgroups, but for the scales of blocks.
  static constexpr int kLoaders = kBlocks || kGroups == 1 ? 4 : 1;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kSums = kRows / 2;  // of a thread

  static constexpr int kWeightBytes = kRows * kChunkBytes, kTokenBytes = kTokens * kChunkBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // Block scales of four chunks: [kTokens, 4], then [4] of the weight's.
  static constexpr int kFourBytes = 16 * kTokens + 128;
  // One warpgroup leaves room for a block of another kernel beside it.
  static constexpr int kRoom = (kGroups == 1 ? 192 : 226) * 1024;
  static constexpr int kStages =
      kBlocks ? (kRoom - 2 * kFourBytes) / (kStageBytes + 16 + kFourBytes / kFour)
              : (kRoom - kGroups * kRows * 4) / (kStageBytes + 16);
  static constexpr int kFours = (kStages + kFour - 2) / kFour + 1;  // whose chunks may be there
  // Or scales of rows, for each group.
  static constexpr int kScaleBytes = kBlocks ? kFours * kFourBytes : kGroups * kRows * 4;
  // From the first multiple of 1,024 on: stages, scales, barriers.
  static constexpr int kScales = kStages * kStageBytes;
  static constexpr int kBarriers = kScales + kScaleBytes;
  static constexpr int kSharedBytes = 1024 + kBarriers + 16 * kStages;
  static_assert(kRows % 16 == 0 && kRows <= kScaleBlock && (!kBlocks || kScaleBlock % kRows == 0));
  static_assert(kSharedBytes <= 227 * 1024 && kStages > 2 * kTogether);
};

struct WideProduct {
  Product p;
  int num_chunks, token_tiles, num_tiles;
  bool whole_vectors;  // y is BF16, its rows and the weight's can be written 16 bytes at a time
};

// The `last` ones have boxes of as many rows as are left for the last tile of tokens: rows that lie
// outside cost more than those inside.
struct WideMaps {
  CUtensorMap weights, tokens, last_tokens;
  CUtensorMap w_scales, x_scales, last_x_scales;  // of blocks
};

// What all roles of a block know.
template <class Tile>
struct WideBlock {
  const WideProduct& wide;
  char* shared;  // from the first multiple of 1,024 on
  uint32_t base;

  __device__ uint32_t full(int slot) const { return base + Tile::kBarriers + 16 * slot; }
  __device__ uint32_t empty(int slot) const { return full(slot) + 8; }
  __device__ uint32_t weights(int slot) const { return base + slot * Tile::kStageBytes; }
  __device__ uint32_t tokens(int slot) const { return weights(slot) + Tile::kWeightBytes; }
  // Block scales of a chunk, counted over all tiles of the block, and its three neighbours.
  __device__ static int four(int index) {
    return Tile::kScales + index / kFour % Tile::kFours * Tile::kFourBytes;
  }

  // Calls body(first row, first token). Neighbouring blocks share the weight.
  template <class Body>
  __device__ void for_tiles(const Body& body) const {
    for (int tile = static_cast<int>(blockIdx.x); tile < wide.num_tiles;
         tile += static_cast<int>(gridDim.x)) {
      const int row_tile = tile / wide.token_tiles;
      body(row_tile * Tile::kRows, (tile - row_tile * wide.token_tiles) * Tile::kTokens);
    }
  }

  // One thread's of each loading warp: they take the chunks in turns, since asking for one takes
  // such a thread longer than the matrix unit needs for it. The first stages' weights and their
  // scales are asked for while the kernel before this one runs.
  __device__ void load(const WideMaps& maps, int loader) const {
    const uint64_t once = read_once();
    const int num_ahead = wide.p.settled ? min(wide.num_chunks, Tile::kStages) : 0;
    RingPlace<Tile::kStages> place{loader};
    int index = loader, tile_index = 0;  // of chunks, counted over all tiles of the block
    for_tiles([&](int row, int token) {
      const int left = static_cast<int>(wide.p.num_tokens) - token;
      const bool last = left < Tile::kTokens;
      const int num_tokens = last ? left : Tile::kTokens;
      const auto load_weights = [&](int slot, int chunk) {
        const bool has_scales = Tile::kBlocks && chunk % kFour == 0;
        const int scale_rows = has_scales ? num_tokens + 1 : 0;
        barrier_expect(full(slot), Tile::kWeightBytes + num_tokens * kChunkBytes + 16 * scale_rows);
        bulk_copy_box(weights(slot), &maps.weights, chunk * kChunkBytes, row, full(slot), once);
        if (has_scales) {
          bulk_copy_box(base + four(tile_index + chunk) + 16 * Tile::kTokens, &maps.w_scales,
                        4 * chunk, row / kScaleBlock, full(slot));
        }
      };
      if (tile_index == 0) {
        if constexpr (Tile::kLoaders > 1) prefetch_map(last ? &maps.last_tokens : &maps.tokens);
        for (int chunk = loader; chunk < num_ahead; chunk += Tile::kLoaders)
          load_weights(chunk, chunk);
        await_predecessor();
      }
      for (int chunk = index - tile_index; chunk < wide.num_chunks; chunk += Tile::kLoaders) {
        const int slot = place.slot;
        if (index >= Tile::kStages) barrier_wait(empty(slot), place.parity ^ 1);
        if (index >= num_ahead) load_weights(slot, chunk);
        bulk_copy_box(tokens(slot), last ? &maps.last_tokens : &maps.tokens, chunk * kChunkBytes,
                      token, full(slot));
        if (Tile::kBlocks && chunk % kFour == 0) {
          bulk_copy_box(base + four(index), last ? &maps.last_x_scales : &maps.x_scales, 4 * chunk,
                        token, full(slot));
        }
        place.advance(Tile::kLoaders);
        index += Tile::kLoaders;
      }
      tile_index += wide.num_chunks;
    });
  }

  // A warpgroup's. Its next product runs while it adds up the last one.
  __device__ void consume(int group) const {
    constexpr int kSums = Tile::kSums, kTogether = Tile::kTogether;
    const Product& p = wide.p;
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    const int tile_token = 64 * group + thread / 32 * 16 + lane / 4;
    auto* const row_scales = reinterpret_cast<float*>(shared + Tile::kScales) + group * Tile::kRows;
    RingPlace<Tile::kStages> place, done;
    [[maybe_unused]] int num_done = 0;
    float acc[kSums], partial[2][kTogether][kSums];

    const auto issue = [&](float(&sums)[kTogether][kSums]) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        barrier_wait(full(place.slot), place.parity);
        const uint64_t a = wgmma_descriptor(tokens(place.slot) + group * 64 * kChunkBytes);
        const uint64_t b = wgmma_descriptor(weights(place.slot));
        if (c == 0) {
          wgmma_fence();
#pragma unroll
          for (auto& sum : sums) wgmma_hold(sum);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<Tile::kRows>::template run<Operands::kE4M3>(sums[c], a + 2 * k, b + 2 * k, k > 0);
        }
        place.advance();
      }
      wgmma_commit();
    };
    const auto release = [&] {
      if (lane == 0) barrier_arrive(empty(done.slot));
      done.advance();
    };
    // Of the oldest chunk, whose product has ended.
    const auto add_one = [&](float(&sum)[kSums]) {
      wgmma_hold(sum);
      if constexpr (Tile::kBlocks) {
        const auto* x_at =
            reinterpret_cast<const float*>(shared + four(num_done)) + num_done % kFour;
        const float* const w_at = x_at + 4 * Tile::kTokens;
        ++num_done;
        const float scale[2] = {x_at[4 * tile_token] * w_at[0],
                                x_at[4 * tile_token + 32] * w_at[0]};
        __syncwarp();
        release();
#pragma unroll
        for (int i = 0; i < kSums; ++i) acc[i] = fmaf(sum[i], scale[i / 2 % 2], acc[i]);
      } else {
        release();
#pragma unroll
        for (int i = 0; i < kSums; ++i) acc[i] += sum[i];
      }
      wgmma_hold(acc);
    };
    const auto add = [&](float(&sums)[kTogether][kSums]) {
#pragma unroll
      for (auto& sum : sums) add_one(sum);
    };

    await_predecessor();
    for_tiles([&](int row, int first_token) {
      const int token = first_token + tile_token;
      [[maybe_unused]] float x_scale[2] = {1, 1};
      if constexpr (!Tile::kBlocks) {
        warpgroup_sync(1 + group);  // the last tile's scales are no longer used
        if (thread < Tile::kRows) {
          const int64_t r = min(row + thread, static_cast<int>(p.weights[0].rows) - 1);
          copy_async_4(shared_address(row_scales + thread),
                       p.weights[0].scales + r * p.weights[0].scale_stride, true);
        }
        copy_async_commit();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int64_t t = min(token + 8 * h, static_cast<int>(p.num_tokens) - 1);
          x_scale[h] = p.x_scales[t * p.x_scale_stride];
        }
      }
#pragma unroll
      for (float& value : acc) value = 0;
      issue(partial[0]);
      int chunk = 0;
      for (; chunk + 2 * kTogether < wide.num_chunks; chunk += 2 * kTogether) {
        issue(partial[1]);
        wgmma_wait<1>();
        add(partial[0]);
        issue(partial[0]);
        wgmma_wait<1>();
        add(partial[1]);
      }
      if (chunk + kTogether < wide.num_chunks) {
        issue(partial[1]);
        wgmma_wait<1>();
        add(partial[0]);
        wgmma_wait<0>();
        add(partial[1]);
      } else {
        wgmma_wait<0>();
        add(partial[0]);
      }
      if constexpr (!Tile::kBlocks) {
        copy_async_wait<0>();
        warpgroup_sync(1 + group);
      }
      store(acc, x_scale, row_scales, row, token);
    });
  }

  // y of this thread's tokens, t and t + 8, and rows first_row + 8 j + 2 (lane % 4) (+ 1).
  __device__ void store(const float (&acc)[Tile::kSums], const float (&x_scale)[2],
                        const float* row_scales, int first_row, int t) const {
    const Product& p = wide.p;
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
    const int rows = static_cast<int>(p.weights[0].rows);
    const auto value_at = [&](int j, int h, int i) {
      float value = acc[4 * j + 2 * h + i];
      if constexpr (!Tile::kBlocks) {
        value = value * row_scales[8 * j + 2 * quad_lane + i] * x_scale[h];
      }
      return value * p.alpha;
    };
    bool plain = wide.whole_vectors;  // and no NaN, whose bits the fast conversion would not keep
    if (wide.whole_vectors) {
      const bool one = quad_lane % 2 == 1, two = quad_lane / 2 == 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool inside = t + 8 * h < p.num_tokens;
        auto* const y = static_cast<Bf16*>(p.y) + (t + 8 * h) * p.y_stride;
#pragma unroll
        for (int j = 0; j + 3 < Tile::kRows / 8; j += 4) {
          // Each thread of a quad has two of four times eight rows; then it has all eight of one.
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float low = value_at(j + i, h, 0), high = value_at(j + i, h, 1);
            plain &= !inside || (low == low && high == high);
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v[i]) : "f"(high), "f"(low));
          }
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint32_t other = __shfl_xor_sync(~0u, one ? v[i] : v[i + 1], 1);
            (one ? v[i] : v[i + 1]) = other;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t other = __shfl_xor_sync(~0u, two ? v[i] : v[i + 2], 2);
            (two ? v[i] : v[i + 2]) = other;
          }
          const int row = first_row + 8 * (j + quad_lane);
          if (inside && row < rows) {
            *reinterpret_cast<uint4*>(y + row) = make_uint4(v[0], v[1], v[2], v[3]);
          }
        }
#pragma unroll
        for (int j = Tile::kRows / 32 * 4; j < Tile::kRows / 8; ++j) {  // those left over
          const float low = value_at(j, h, 0), high = value_at(j, h, 1);
          plain &= !inside || (low == low && high == high);
          uint32_t v;
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
          const int row = first_row + 8 * j + 2 * quad_lane;
          if (inside && row < rows) *reinterpret_cast<uint32_t*>(y + row) = v;
        }
      }
    }
    if (__all_sync(~0u, plain)) return;
    const FloatArray y{p.y, p.y_is_bf16}, bias{const_cast<void*>(p.bias), p.bias_is_bf16};
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const int64_t row = first_row + i / 4 * 8 + 2 * quad_lane + i % 2, token = t + i / 2 % 2 * 8;
      if (row >= rows || token >= p.num_tokens) continue;
      float value = value_at(i / 4, i / 2 % 2, i % 2);
      if (p.bias != nullptr) value += bias.get(row);
      const int64_t at = token * p.y_stride + row;
      if (p.accumulate) value += y.get(at);
      y.set(at, value);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    wide_kernel(const __grid_constant__ WideProduct wide, const __grid_constant__ WideMaps maps) {
  extern __shared__ char shared[];
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  const WideBlock<Tile> block{wide, shared + (base - unaligned), base};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      barrier_init(block.full(slot), 1);
      barrier_init(block.empty(slot), 4 * Tile::kGroups);
    }
    barrier_fence_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4 * Tile::kGroups) {
    if constexpr (Tile::kGroups > 1) take_registers<kConsumerRegisters>();
    block.consume(warp / 4);
  } else {
    if constexpr (Tile::kGroups > 1) give_registers<kLoaderRegisters>();
    const int loader = warp - 4 * Tile::kGroups;
    if (threadIdx.x % 32 == 0 && loader < Tile::kLoaders) block.load(maps, loader);
  }
}

template <class Tile>
bool launch_wide(Context& context, const Product& product) {
  static const cudaError_t status = cudaFuncSetAttribute(
      wide_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  check(status, "linear");
  const ProductWeight& weight = product.weights[0];
  const int64_t tokens = product.num_tokens;
  WideProduct wide{};
  wide.p = product;
  wide.num_chunks = static_cast<int>(divide_up(product.depth, kChunkBytes));
  wide.token_tiles = static_cast<int>(divide_up(tokens, Tile::kTokens));
  wide.num_tiles = static_cast<int>(divide_up(weight.rows, Tile::kRows)) * wide.token_tiles;
  wide.whole_vectors = product.y_is_bf16 && !product.accumulate && product.bias == nullptr &&
                       weight.rows % 8 == 0 && product.y_stride % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(product.y) % 16 == 0;
  const int last = static_cast<int>(tokens) - (wide.token_tiles - 1) * Tile::kTokens;

  WideMaps maps;
  const auto map_tokens = [&](CUtensorMap& map, CUtensorMap& scales, int box_rows) {
    return make_tensor_map(map, product.x, product.depth, tokens, product.x_stride, box_rows) &&
           (!Tile::kBlocks || make_scale_map(scales, product.x_scales, wide.num_chunks, tokens,
                                             product.x_scale_stride, box_rows));
  };
  if (!make_tensor_map(maps.weights, weight.data, product.depth, weight.rows, weight.stride,
                       Tile::kRows) ||
      !map_tokens(maps.tokens, maps.x_scales, Tile::kTokens) ||
      !map_tokens(maps.last_tokens, maps.last_x_scales, last) ||
      (Tile::kBlocks &&
       !make_scale_map(maps.w_scales, weight.scales, wide.num_chunks,
                       divide_up(weight.rows, kScaleBlock), weight.scale_stride, 1))) {
    return false;
  }
  const int blocks = std::min(wide.num_tiles, context.num_multiprocessors());
  launch("linear", context,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .num_threads = Tile::kThreads,
          .shared_bytes = Tile::kSharedBytes},
         wide_kernel<Tile>, wide, maps);
  return true;
}

// A tile, and about how many nanoseconds a chunk of K takes it: from products of 4,096 rows and
// 4,096 or 12,288 of K on an H200, where 32 to 128 multiprocessors had one tile each.
struct Choice {
  int tokens, rows;
  int64_t nanoseconds;
  bool (*launch)(Context&, const Product&);
};
template <class Tile>
constexpr Choice choice_of(int64_t nanoseconds) {
  return {Tile::kTokens, Tile::kRows, nanoseconds, launch_wide<Tile>};
}
constexpr auto kScaled = ProductFormat::kScaled, kBlocks = ProductFormat::kBlocks;
constexpr Choice kOfScaled[] = {
    choice_of<WideTile<kScaled, 1, 64>>(180), choice_of<WideTile<kScaled, 2, 64>>(212),
    choice_of<WideTile<kScaled, 2, 96>>(230), choice_of<WideTile<kScaled, 2, 128>>(295)};
constexpr Choice kOfBlocks[] = {choice_of<WideTile<kBlocks, 1, 64>>(221),
                                choice_of<WideTile<kBlocks, 1, 128>>(282),
                                choice_of<WideTile<kBlocks, 2, 128>>(390)};

// Few tokens, where memory bounds all: the narrowest tile of which there is one to a
// multiprocessor at most, or the widest.
template <ProductFormat kFormat>
bool launch_few(Context& context, const Product& product) {
  constexpr int kTogether = kFormat == kBlocks ? 2 : 1;
  const int64_t share = divide_up(product.weights[0].rows, context.num_multiprocessors());
  if (share <= 32) return launch_wide<WideTile<kFormat, 1, 32, kTogether>>(context, product);
  if constexpr (kFormat == kScaled) {
    if (share <= 48) return launch_wide<WideTile<kFormat, 1, 48>>(context, product);
  }
  return launch_wide<WideTile<kFormat, 1, 64, kTogether>>(context, product);
}

// Launches that which takes the shortest.
template <ProductFormat kFormat>
bool launch_best(Context& context, const Product& product, std::span<const Choice> choices) {
  if (product.num_tokens <= kFewTokens) return launch_few<kFormat>(context, product);
  const auto time = [&](const Choice& choice) {
    const int64_t tiles = divide_up(product.weights[0].rows, choice.rows) *
                          divide_up(product.num_tokens, choice.tokens);
    return divide_up(tiles, context.num_multiprocessors()) * choice.nanoseconds;
  };
  return std::ranges::min_element(choices, {}, time)->launch(context, product);
}

bool is_aligned(const float* scales, int64_t stride) {
  return reinterpret_cast<uintptr_t>(scales) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

bool run_wide_product(Context& context, const Product& product) {
  const ProductWeight& weight = product.weights[0];
  if (product.num_weights != 1 || product.num_tokens > kManyTokens || product.depth < kChunkBytes ||
      product.x_is_e5m2 || weight.x_offset != 0) {
    return false;
  }
  switch (product.format) {
    case ProductFormat::kBF16:
      return false;
    case ProductFormat::kScaled:
      return launch_best<kScaled>(context, product, kOfScaled);
    case ProductFormat::kBlocks:
      return weight.row_block == kScaleBlock && weight.chunk_stride == 1 &&
             divide_up(product.depth, kChunkBytes) % kFour == 0 &&
             is_aligned(weight.scales, weight.scale_stride) &&
             is_aligned(product.x_scales, product.x_scale_stride) &&
             launch_best<kBlocks>(context, product, kOfBlocks);
  }
  return false;
}

}  // namespace octet::cuda
