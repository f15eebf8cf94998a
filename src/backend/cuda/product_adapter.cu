// The products of adapters, BF16, for every architecture: few outputs of many inputs (LoRA's A) and
// many outputs of few inputs (B), each for all weights of a group in one launch.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/cluster.cuh"
#include "backend/cuda/device/product_pieces.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kColumns = 32;  // outputs of a block of the first kernel, of a warp of the second
constexpr int64_t kSegmentInputs = 512;
constexpr int kSegmentChunks = kSegmentInputs * 2 / kChunkBytes;
constexpr int kClusterBlocks = 8;
constexpr int kMostPartials = 8;          // segments of a block of a cluster
constexpr int64_t kMostClustered = 1024;  // tokens; more fill the device by themselves
constexpr int64_t kFewInputs = 128;

// The tile of a group's outputs with this index: a weight, its rows, and their columns in y.
struct Part {
  const ProductWeight& weight;
  int64_t first_row, column;
  __device__ Part(const Tiles& tiles, int index) : Part(tiles, index, part_of(tiles, index)) {}

 private:
  __device__ static int part_of(const Tiles& tiles, int index) {
    int part = 0;
    while (part + 1 < tiles.p.num_weights && index >= tiles.first_tile[part + 1]) ++part;
    return part;
  }
  __device__ Part(const Tiles& tiles, int index, int part)
      : weight(tiles.p.weights[part]),
        first_row(int64_t{index - tiles.first_tile[part]} * kColumns),
        column(tiles.first_column[part] + first_row) {}
};

// A block takes 16 kTokenWarps tokens, all of K or, in a cluster, every eighth segment of it; its
// warps share the tokens and the outputs.
template <int kTokenWarps>
struct NarrowShape {
  static constexpr int kTokens = 16 * kTokenWarps;
  static constexpr int kColumnWarps = kWarps / kTokenWarps;
  static constexpr int kTiles = kColumns / 8 / kColumnWarps;  // of eight outputs, of a warp
  // Of few tokens so many that a block has room beside one of a product.
  static constexpr int kStages = kTokenWarps == 1 ? kSegmentChunks / 2 : kSegmentChunks;
  static constexpr int kStageBytes = (kTokens + kColumns) * kChunkBytes;
  static constexpr int kPartialBytes = kTokens * kColumns * 4;
  static int shared_bytes(int num_partials) {
    return kStages * kStageBytes + num_partials * kPartialBytes;
  }
};

template <int kTokenWarps, bool kClustered>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ Tiles tiles, int num_tiles, int num_segments) {
  using S = NarrowShape<kTokenWarps>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t base = shared_address(shared);
  const Product& p = tiles.p;
  const Part part(tiles, static_cast<int>(blockIdx.x) % num_tiles);
  const int64_t first_token = int64_t{static_cast<int>(blockIdx.x) / num_tiles} * S::kTokens;
  const int rank = static_cast<int>(blockIdx.y), num_ranks = static_cast<int>(gridDim.y);
  const int num_own = (num_segments - rank + num_ranks - 1) / num_ranks;  // segments
  const auto load_stage = [&](int index) {
    if (index < num_own * kSegmentChunks) {
      const uint32_t stage = base + index % S::kStages * S::kStageBytes;
      const int chunk =
          (rank + index / kSegmentChunks * num_ranks) * kSegmentChunks + index % kSegmentChunks;
      load_tile<S::kTokens, kThreads>(static_cast<const char*>(p.x), p.x_stride * 2, first_token,
                                      p.num_tokens, chunk, tiles.depth_bytes, stage);
      load_tile<kColumns, kThreads>(static_cast<const char*>(part.weight.data),
                                    part.weight.stride * 2, part.first_row, part.weight.rows, chunk,
                                    tiles.depth_bytes, stage + S::kTokens * kChunkBytes);
    }
    copy_async_commit();
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_token = warp % kTokenWarps * 16;
  const int warp_column = warp / kTokenWarps * 8 * S::kTiles;
  auto* const partials = reinterpret_cast<float*>(shared + S::kStages * S::kStageBytes);
  // Beside the kernel before this one, or after it.
  if (p.x_settled) {
    invite_successor();
  } else {
    await_predecessor();
  }
#pragma unroll
  for (int index = 0; index < S::kStages - 1; ++index) load_stage(index);
  [[maybe_unused]] float total[S::kTiles][4] = {};
  for (int segment = 0; segment < num_own; ++segment) {
    float sum[S::kTiles][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kSegmentChunks; ++chunk) {
      const int index = segment * kSegmentChunks + chunk;
      copy_async_wait<S::kStages - 2>();
      __syncthreads();  // this chunk has landed, and everyone is done with the one before
      load_stage(index + S::kStages - 1);
      const uint32_t x = base + index % S::kStages * S::kStageBytes;
      const uint32_t w = x + S::kTokens * kChunkBytes;
      uint32_t a[kChunkSteps][4];
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) {
        load_pieces(x, warp_token + lane % 16, 2 * step + lane / 16, a[step]);
      }
#pragma unroll
      for (int j = 0; j < S::kTiles; ++j) {
#pragma unroll
        for (int pair = 0; pair < kChunkSteps / 2; ++pair) {
          uint32_t b[4];
          load_pieces(w, warp_column + 8 * j + lane % 8, 4 * pair + lane / 8, b);
          mma_16x8x16<false>(sum[j], a[2 * pair], b[0], b[1]);
          mma_16x8x16<false>(sum[j], a[2 * pair + 1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < S::kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kClustered) {
          const int token = warp_token + g + i / 2 * 8;
          const int column = warp_column + 8 * j + 2 * t + i % 2;
          partials[(segment * S::kTokens + token) * kColumns + column] = sum[j][i];
        } else {
          total[j][i] += sum[j][i];
        }
      }
    }
  }

  const FloatArray y{p.y, p.y_is_bf16}, bias{const_cast<void*>(p.bias), p.bias_is_bf16};
  const auto write = [&](int token, int column, float value) {
    if (first_token + token >= p.num_tokens || part.first_row + column >= part.weight.rows) return;
    const int64_t at = (first_token + token) * p.y_stride + part.column + column;
    value *= p.alpha;
    if (p.bias != nullptr) value += bias.get(part.column + column);
    if (p.accumulate) value += y.get(at);
    y.set(at, value);
  };
  if constexpr (kClustered) {
    cluster_arrive();
    cluster_wait();
    for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < S::kTokens * kColumns;
         i += num_ranks * kThreads) {
      float value = 0;
      for (int segment = 0; segment < num_segments; ++segment) {
        value += load_of_rank(partials + segment / num_ranks * S::kTokens * kColumns + i,
                              segment % num_ranks);
      }
      write(i / kColumns, i % kColumns, value);
    }
    cluster_arrive();
    cluster_wait();
  } else {
#pragma unroll
    for (int j = 0; j < S::kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        write(warp_token + g + i / 2 * 8, warp_column + 8 * j + 2 * t + i % 2, total[j][i]);
      }
    }
  }
  if (p.x_settled) await_predecessor();  // whoever waits for this kernel waits for both
}

template <int kTokenWarps, bool kClustered>
void launch_narrow(Context& context, Tiles& tiles, int num_segments) {
  using S = NarrowShape<kTokenWarps>;
  const int num_tiles = place_tiles(tiles, kColumns);
  const auto blocks = static_cast<unsigned>(num_tiles * divide_up(tiles.p.num_tokens, S::kTokens));
  const int num_partials =
      kClustered ? static_cast<int>(divide_up(num_segments, kClusterBlocks)) : 0;
  const auto kernel = narrow_kernel<kTokenWarps, kClustered>;
  static const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           S::shared_bytes(kClustered ? kMostPartials : 0));
  check(status, "linear");
  launch("linear", context,
         {.grid = dim3(blocks, kClustered ? kClusterBlocks : 1),
          .num_threads = kThreads,
          .clustered = kClustered,
          .shared_bytes = static_cast<unsigned>(S::shared_bytes(num_partials))},
         kernel, tiles, num_tiles, num_segments);
}

// A warp takes a few times 16 tokens and kColumns outputs; output c of tile j of eight is column
// 8 (c / 2) + 2 j + c % 2, so that a lane's are eight neighbours. What it needs of all of its
// tokens is asked for at once.
constexpr int token_tiles(int steps) { return steps <= 2 ? 4 : steps <= 4 ? 2 : 1; }

template <int kSteps>  // of 16 inputs
__global__ void __launch_bounds__(kThreads)
    shallow_kernel(const __grid_constant__ Tiles tiles, int num_tiles) {
  constexpr int kTokenTiles = token_tiles(kSteps);
  const Product& p = tiles.p;
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (!p.settled || index >= num_tiles) await_predecessor();
  if (index >= num_tiles) return;
  const Part part(tiles, index);
  const int depth = static_cast<int>(p.depth);
  // Elements 2 t, 2 t + 1 of a step of 16, and the same eight behind.
  const auto pair_at = [&](const Bf16* row, int step, int half) -> uint32_t {
    const int at = 16 * step + 8 * half + 2 * t;
    return row != nullptr && at < depth ? *reinterpret_cast<const uint32_t*>(row + at) : 0;
  };
  uint32_t b[kColumns / 8][kSteps][2];
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int64_t row = part.first_row + 8 * (g / 2) + 2 * j + g % 2;
    const Bf16* from = row < part.weight.rows
                           ? static_cast<const Bf16*>(part.weight.data) + row * part.weight.stride
                           : nullptr;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      b[j][step][0] = pair_at(from, step, 0);
      b[j][step][1] = pair_at(from, step, 1);
    }
  }
  if (p.settled) await_predecessor();
  const int64_t first_token = int64_t{blockIdx.y} * kTokenTiles * 16 + g;  // + 16 tile + 8 h
  const bool has_columns = part.first_row + 8 * t < part.weight.rows;
  const auto y_of = [&](int64_t token) {
    return static_cast<Bf16*>(p.y) + token * p.y_stride + part.column + 8 * t;
  };
  uint32_t a[kTokenTiles][kSteps][4];
  uint4 old[kTokenTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t token = first_token + 16 * tile + 8 * h;
      const bool valid = token < p.num_tokens;
      const Bf16* from =
          valid ? static_cast<const Bf16*>(p.x) + token * p.x_stride + part.weight.x_offset
                : nullptr;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        a[tile][step][h] = pair_at(from, step, 0);
        a[tile][step][2 + h] = pair_at(from, step, 1);
      }
      if (valid && has_columns && p.accumulate) {
        old[tile][h] = *reinterpret_cast<const uint4*>(y_of(token));
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    float sum[kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        mma_16x8x16<false>(sum[j], a[tile][step], b[j][step][0], b[j][step][1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t token = first_token + 16 * tile + 8 * h;
      if (token >= p.num_tokens || !has_columns) continue;
      float value[8], before[8];
      if (p.accumulate) unpack8(old[tile][h], before);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[i] = sum[i / 2][2 * h + i % 2] * p.alpha;
        if (p.accumulate) value[i] += before[i];
      }
      store_vector(value, y_of(token));
    }
  }
}

template <int kSteps>
void launch_shallow(Context& context, Tiles& tiles) {
  const int num_tiles = place_tiles(tiles, kColumns);
  launch(
      "linear", context,
      {.grid = dim3(static_cast<unsigned>(divide_up(num_tiles, kWarps)),
                    static_cast<unsigned>(divide_up(tiles.p.num_tokens, 16 * token_tiles(kSteps)))),
       .num_threads = kThreads},
      shallow_kernel<kSteps>, tiles, num_tiles);
}

}  // namespace

bool is_segmented(int64_t rows, int64_t depth) { return rows <= 128 && depth >= 1024; }

void run_segmented_product(Context& context, const Product& product) {
  Tiles tiles = tiles_of(product);
  const auto num_segments = static_cast<int>(divide_up(product.depth, kSegmentInputs));
  const bool clustered = !context.portable() && product.num_tokens <= kMostClustered &&
                         num_segments <= kClusterBlocks * kMostPartials;
  // Which tile serves has no part in the bytes.
  if (!clustered) return launch_narrow<4, false>(context, tiles, num_segments);
  if (product.num_tokens <= 16) return launch_narrow<1, true>(context, tiles, num_segments);
  if (product.num_tokens <= 512) return launch_narrow<2, true>(context, tiles, num_segments);
  launch_narrow<4, true>(context, tiles, num_segments);
}

bool run_shallow_product(Context& context, const Product& product) {
  const auto address = reinterpret_cast<uintptr_t>(product.y);
  if (product.format != ProductFormat::kBF16 || product.depth > kFewInputs ||
      product.bias != nullptr || !product.y_is_bf16 || address % 16 != 0 ||
      product.y_stride % 8 != 0) {
    return false;
  }
  for (int i = 0; i < product.num_weights; ++i) {
    if (product.weights[i].rows % 8 != 0) return false;
  }
  Tiles tiles = tiles_of(product);
  if (product.depth <= 16) {
    launch_shallow<1>(context, tiles);
  } else if (product.depth <= 32) {
    launch_shallow<2>(context, tiles);
  } else if (product.depth <= 64) {
    launch_shallow<4>(context, tiles);
  } else {
    launch_shallow<8>(context, tiles);
  }
  return true;
}

}  // namespace octet::cuda
