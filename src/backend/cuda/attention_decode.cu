// Decoding on Hopper: warps that walk chunks of single-token sequences. A warp's tiles arrive by
// the tensor memory accelerator, some ahead; keys are the wide operand (S = K Qᵀ, O = Vᵀ P), so
// that a group of up to eight query heads costs one column each.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kPageKeys = 16;
constexpr int kTilePages = kTileKeys / kPageKeys;
constexpr int kPanelBytes = kTileKeys * 128;  // a tile's keys, 128 bytes of each
constexpr int kMaxSequences = 4096;

// Row r of a fragment of eight is key_of(r): so eight neighbouring lanes load from all banks.
__device__ constexpr int key_of(int row) {
  return (row & 1) << 2 | (row & 4) >> 1 | (row & 2) >> 1;
}

// The value of lane g for all lanes that share a column, by `combine`.
__device__ inline float column_max(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  }
  return x;
}
// In the order of the keys' residues: lane bits 3, 4, 2 are residue bits 0, 1, 2.
__device__ inline float column_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 16);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 4);
}

// An 8 × 8 matrix of 16-bit values, transposed over the warp.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

template <bool kFp8, int kWidth>
struct Decode {
  static constexpr int kPanels = kWidth * (kFp8 ? 1 : 2) / 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;  // of keys, and of values
  static constexpr int kScaleBytes = kFp8 ? kTileKeys * 4 : 0;
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kMTiles = kWidth / 16;  // of 16 head elements
  static constexpr int kPageBytes =
      2 * (kPanels * kPageKeys * 128 + (kFp8 ? kPageKeys * 4 : 0));  // of a page's head

  // Registers of a lane (g = lane / 4, t = lane % 4); queries 2t and 2t + 1 are its columns.
  struct State {
    float maximum[2], sum[2];  // sum: of the keys with key % 8 = key_of(g)
    float out[kMTiles][4];     // C registers: element_of(m, e / 2), query 2t + e % 2
  };

  __device__ static int element_of(int m, int half, int g) {
    return kFp8 ? 16 * key_of(g) + 2 * m + half : m / 4 * 64 + 8 * key_of(g) + 2 * (m % 4) + half;
  }

  // The row of query head g: B fragments in the order of AttentionTile::load_queries.
  __device__ static float load_query(const Bf16* row, int lane, uint32_t (&q)[kSteps][2]) {
    const int t = lane % 4;
    constexpr int kWords = kFp8 ? 8 : 4;  // of a lane's neighbouring elements, two to a word
    float amax = 0;
#pragma unroll
    for (int group = 0; group < kSteps * 2 / kWords; ++group) {
#pragma unroll
      for (int part = 0; part < kWords / 4; ++part) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (row != nullptr) {
          words =
              *reinterpret_cast<const uint4*>(row + group * 8 * kWords + 2 * kWords * t + 8 * part);
        }
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 4 * part + i;
          q[group * kWords / 2 + word / 2][word % 2] = w[i];
          amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(w[i] << 16)),
                                   fabsf(__uint_as_float(w[i] & 0xFFFF0000u))));
        }
      }
    }
    if constexpr (!kFp8) return 1;
    amax = quad_max(amax);
    const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
    const int shift = amax == 0 ? 0 : max(-100, min(100, 14 - exponent));
    const float scale = power_of_two(shift);
#pragma unroll
    for (auto& step : q) {
#pragma unroll
      for (uint32_t& pair : step) {
        pair = pack_half(__uint_as_float(pair << 16) * scale,
                         __uint_as_float(pair & 0xFFFF0000u) * scale);
      }
    }
    return power_of_two(-shift);
  }

  // weights[b][h][e] = q · k of key 16 b + 8 h + key_of(g) and query 2t + e.
  __device__ static void multiply_keys(const char* keys, int lane, const uint32_t (&q)[kSteps][2],
                                       float (&weights)[4][2][2]) {
    const int row = key_of(lane / 4), t = lane % 4;
    const char* at = keys + row * 128 + ((t ^ row) << 4);
    const int flip = (((4 + t) ^ row) << 4) - ((t ^ row) << 4);  // to the other half of the panel
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int piece = 0; piece < 2 * kPanels; ++piece) {
        const char* from = at + piece / 2 * kPanelBytes + (piece % 2 != 0 ? flip : 0) + b * 2048;
        const uint4 low = *reinterpret_cast<const uint4*>(from);
        const uint4 high = *reinterpret_cast<const uint4*>(from + 1024);
        const uint32_t l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
        if constexpr (kFp8) {
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const uint32_t a[4] = {half2_of_e4m3(l[s]), half2_of_e4m3(h[s]),
                                   half2_of_e4m3(l[s] >> 16), half2_of_e4m3(h[s] >> 16)};
            mma_16x8x16<true>(c, a, q[4 * piece + s][0], q[4 * piece + s][1]);
          }
        } else {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint32_t a[4] = {l[2 * s], h[2 * s], l[2 * s + 1], h[2 * s + 1]};
            mma_16x8x16<false>(c, a, q[2 * piece + s][0], q[2 * piece + s][1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[b][i / 2][i % 2] = c[i];
    }
  }

  // Scores, softmax weights and the fold of maximum and sums, as AttentionTile::weigh.
  __device__ static void weigh(const float* k_scales, int lane, int first, int last,
                               const float (&factor)[2], State& state, float (&weights)[4][2][2],
                               Fold (&folds)[2]) {
    const int row = key_of(lane / 4);
    const bool edge = first > 0 || last < kTileKeys - 1;
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = 16 * b + 8 * h + row;
        [[maybe_unused]] const float scale = kFp8 ? k_scales[key] : 1.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float score = weights[b][h][e];
          if constexpr (kFp8) score *= scale;
          score *= factor[e];
          if (edge && (key < first || key > last)) score = -INFINITY;
          weights[b][h][e] = score;
          largest[e] = fmaxf(largest[e], score);
        }
      }
    }
    float shift[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      largest[e] = column_max(largest[e]);
      shift[e] = largest[e] == -INFINITY ? 0.0f : largest[e];
      folds[e] = fold_of(state.maximum[e], largest[e]);
      state.maximum[e] = folds[e].maximum;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weights[b][h][e] = exp2_fast(weights[b][h][e] - shift[e]);
          sum[e] += weights[b][h][e];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) state.sum[e] = fold(folds[e], state.sum[e], sum[e]);
  }

  // Adds the weighted values, as AttentionTile::add_values.
  __device__ static void add_values(const char* values, const float* v_scales, int lane,
                                    float (&weights)[4][2][2], const Fold (&folds)[2],
                                    State& state) {
    const int g = lane / 4, t = lane % 4;
    float down[2] = {1, 1}, up[2] = {1, 1};
    if constexpr (kFp8) {
      float top[2] = {0, 0};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = v_scales[16 * b + 8 * h + key_of(g)];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            weights[b][h][e] *= scale;
            top[e] = fmaxf(top[e], weights[b][h][e]);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[e] = column_max(top[e]);
        const int exponent = static_cast<int>(__float_as_uint(top[e]) >> 23) - 127;
        const int power = top[e] == 0 ? 0 : max(-100, min(100, exponent));
        up[e] = power_of_two(-power);
        down[e] = power_of_two(power);
      }
    }
    float acc[kMTiles][4] = {};
    // Keys t and t + 4 of eight are neighbours in the order of the fragments.
    const char* at = values + t * 128 + ((key_of(g) ^ t) << 4);
    const int flip = 512 + ((key_of(g) ^ (t + 4)) << 4) - ((key_of(g) ^ t) << 4);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      uint32_t p[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = weights[b][h][0] * up[0], y = weights[b][h][1] * up[1];
        p[h] = transpose_8x8(kFp8 ? pack_half(x, y) : pack_bf16(x, y));
      }
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        uint32_t w[4][4];  // rows t, t + 4, t + 8, t + 12; 16 bytes
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 words = *reinterpret_cast<const uint4*>(
              at + panel * kPanelBytes + b * 2048 + i / 2 * 1024 + (i % 2 != 0 ? flip : 0));
          w[i][0] = words.x, w[i][1] = words.y, w[i][2] = words.z, w[i][3] = words.w;
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          if constexpr (kFp8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const unsigned order = half == 0 ? 0x5140 : 0x7362;
              const uint32_t low = __byte_perm(w[0][word], w[1][word], order);
              const uint32_t high = __byte_perm(w[2][word], w[3][word], order);
              const uint32_t a[4] = {half2_of_e4m3(low), half2_of_e4m3(low >> 16),
                                     half2_of_e4m3(high), half2_of_e4m3(high >> 16)};
              mma_16x8x16<true>(acc[2 * word + half], a, p[0], p[1]);
            }
          } else {
            const uint32_t a[4] = {__byte_perm(w[0][word], w[1][word], 0x5410),
                                   __byte_perm(w[0][word], w[1][word], 0x7632),
                                   __byte_perm(w[2][word], w[3][word], 0x5410),
                                   __byte_perm(w[2][word], w[3][word], 0x7632)};
            mma_16x8x16<false>(acc[4 * panel + word], a, p[0], p[1]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& out = state.out[m][i];
        const float value = kFp8 ? acc[m][i] * down[i % 2] : acc[m][i];
        out = fold(folds[i % 2], out, value);
      }
    }
  }

  __device__ static void write(const AttentionProblem& p, int sequence, int head, int chunk,
                               int lane, const State& state) {
    const int g = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = column_sum(state.sum[e]);
      const int query = 2 * (lane % 4) + e;
      if (query >= p.group) continue;
      const int64_t index = chunk_index(p, sequence, head * p.group + query, chunk);
      if (g == 0) p.chunk_stats[index] = make_float2(state.maximum[e], sum);
      float* to = p.chunk_values + index * kWidth;
#pragma unroll
      for (int m = 0; m < kMTiles; m += 2) {
        *reinterpret_cast<float4*>(to + element_of(m, 0, g)) = make_float4(
            state.out[m][e], state.out[m][2 + e], state.out[m + 1][e], state.out[m + 1][2 + e]);
      }
    }
  }
};

// A warp's walk over its items: chunk c of a sequence and key/value head.
struct Walk {
  int index, sequence, chunk, head;
  int begin, end, limit, first_key;  // keys

  __device__ bool to(const AttentionProblem& p, const int* first, int next, int lane) {
    index = next;
    const int flat = index / p.keys.heads;
    if (flat >= first[p.num_sequences]) return false;
    head = index - flat * p.keys.heads;
    sequence = find_sequence(first, p.num_sequences, flat, sequence, lane);
    chunk = own_chunks(p, sequence).begin + flat - first[sequence];
    limit = p.context_lengths[sequence];
    first_key = p.window > 0 ? max(0, limit - p.window) : 0;
    begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
    end = min((chunk + 1) * kChunkKeys, limit);
    return true;
  }
};

template <bool kFp8, int kWidth, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, 1)
    decode_kernel(const __grid_constant__ AttentionProblem p,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  using D = Decode<kFp8, kWidth>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[kWarps * kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t unaligned = shared_address(shared), tiles = (unaligned + 1023u) & ~1023u;
  char* const tiles_at = shared + (tiles - unaligned);
  // Tiles of all warps' stages, then their scales, then the sequences' first chunks.
  constexpr int kAllTiles = kWarps * kStages * 2 * D::kTileBytes;
  constexpr int kAllScales = kWarps * kStages * 2 * D::kScaleBytes;
  int* const first = reinterpret_cast<int*>(tiles_at + kAllTiles + kAllScales);
  prefix_sums<32 * kWarps>(
      p.num_sequences,
      [&](int s) {
        const ChunkRange range = own_chunks(p, s);
        return range.end - range.begin;
      },
      first);
  const uint32_t barrier = shared_address(barriers + warp * kStages);
  if (lane < kStages) barrier_init(barrier + 8 * lane, 1);
  barrier_fence_init();
  __syncthreads();

  const int stride = static_cast<int>(gridDim.x) * kWarps;
  const int worker = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const auto tile_of = [&](int stage) { return (warp * kStages + stage) * 2 * D::kTileBytes; };
  const auto scales_of = [&](int stage) {
    return kAllTiles + (warp * kStages + stage) * 2 * D::kScaleBytes;
  };

  // The loads run ahead of the arithmetic; page numbers of the item after the next are on their
  // way.
  Walk load{};
  bool loading = load.to(p, first, worker, lane);
  const auto pages_of = [&](const Walk& w) {
    const int table = w.chunk * (kChunkKeys / kPageKeys) + lane;
    const bool inside =
        lane < kChunkKeys / kPageKeys && table < p.keys.max_pages && table * kPageKeys < w.limit;
    const int page = inside ? p.keys.pages[w.sequence * p.table_stride + table] : -1;
    return page < p.keys.num_pages ? page : -1;
  };
  int pages = loading ? pages_of(load) : -1, next_pages = -1;
  int load_tile = load.begin;
  Walk next = load;
  bool has_next = loading && next.to(p, first, worker + stride, lane);
  if (has_next) next_pages = pages_of(next);
  const auto issue = [&](int stage) {
    if (!loading) return;
    const int kind = lane / kTilePages, i = lane % kTilePages;  // keys, values, their scales
    const int in_chunk = (load_tile - load.chunk * kChunkKeys) / kPageKeys + i;
    const int page = __shfl_sync(0xFFFFFFFFu, pages, in_chunk & 31);
    const bool valid = page >= 0 && load_tile + i * kPageKeys < load.end;
    const unsigned count = __popc(__ballot_sync(0xFFFFFFFFu, valid) & 0xFu);
    const uint32_t done = barrier + 8 * stage;
    if (lane == 0) barrier_expect(done, count * D::kPageBytes);
    __syncwarp();
    if (valid && kind < 2) {
      const int row = (page * p.keys.heads + load.head) * kPageKeys;
      const uint32_t to = tiles + tile_of(stage) + kind * D::kTileBytes + i * kPageKeys * 128;
#pragma unroll
      for (int panel = 0; panel < D::kPanels; ++panel) {
        bulk_copy_box(to + panel * kPanelBytes, kind == 0 ? &k_map : &v_map, panel * 128, row,
                      done);
      }
    } else if (kFp8 && valid && kind < 4) {
      const float* scales = (kind == 2 ? p.keys.k_scales : p.keys.v_scales) +
                            page * p.keys.scale_page_stride + load.head * kPageKeys;
      bulk_copy(tiles + scales_of(stage) + (kind - 2) * D::kScaleBytes + i * kPageKeys * 4, scales,
                kPageKeys * 4, done);
    }
    load_tile += kTileKeys;
    if (load_tile < load.end) return;
    loading = has_next;
    load = next;
    pages = next_pages;
    load_tile = load.begin;
    has_next = loading && next.to(p, first, load.index + stride, lane);
    if (has_next) next_pages = pages_of(next);
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) issue(stage);

  int stage = 0;
  uint32_t parity = 0;
  Walk walk{};
  for (int index = worker; walk.to(p, first, index, lane); index += stride) {
    const int token = p.query_offsets[walk.sequence], g = lane / 4;
    const Bf16* row = g < p.group
                          ? p.q + token * p.q_stride + (int64_t{walk.head} * p.group + g) * kWidth
                          : nullptr;
    uint32_t q[D::kSteps][2];
    const float own_factor = D::load_query(row, lane, q) * p.factor;
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factor[e] = __shfl_sync(0xFFFFFFFFu, own_factor, 4 * (2 * (lane % 4) + e));
    }
    typename D::State state;
#pragma unroll
    for (int e = 0; e < 2; ++e) state.maximum[e] = -INFINITY, state.sum[e] = 0;
#pragma unroll
    for (auto& tile : state.out) {
#pragma unroll
      for (float& value : tile) value = 0;
    }
    for (int tile = walk.begin; tile < walk.end; tile += kTileKeys) {
      char* const keys = tiles_at + tile_of(stage);
      char* const values = keys + D::kTileBytes;
      auto* const scales = reinterpret_cast<float*>(tiles_at + scales_of(stage));
      const int last = walk.limit - 1 - tile;
      barrier_wait(barrier + 8 * stage, parity);
      if (last < kTileKeys - 1) {  // values that nobody wrote must not meet a weight of zero
        for (int r = last + 1 + lane / 8; r < kTileKeys; r += 4) {
#pragma unroll
          for (int panel = 0; panel < D::kPanels; ++panel) {
            *reinterpret_cast<uint4*>(values + panel * kPanelBytes + r * 128 + lane % 8 * 16) =
                make_uint4(0, 0, 0, 0);
          }
          if (kFp8 && lane % 8 == 0) scales[kTileKeys + r] = 0;
        }
        fence_async_proxy();
        __syncwarp();
      }
      float weights[4][2][2];
      Fold folds[2];
      D::multiply_keys(keys, lane, q, weights);
      D::weigh(scales, lane, walk.first_key - tile, last, factor, state, weights, folds);
      D::add_values(values, scales + kTileKeys, lane, weights, folds, state);
      __syncwarp();
      issue(stage);
      if (++stage == kStages) stage = 0, parity ^= 1u;
    }
    D::write(p, walk.sequence, walk.head, walk.chunk, lane, state);
  }
}

// A matrix of `rows` rows of `row_bytes`, in boxes of 16 rows and 128 bytes, swizzled.
bool make_map(CUtensorMap& map, const void* data, int64_t row_bytes, int64_t rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {128, kPageKeys}, steps[2] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <bool kFp8, int kWidth, int kWarps, int kStages>
bool launch(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  using D = Decode<kFp8, kWidth>;
  CUtensorMap k_map, v_map;
  const int64_t rows = cache.k.shape[0] * cache.num_heads() * kPageKeys;
  const int64_t row_bytes = kWidth * (kFp8 ? 1 : 2);
  if (!make_map(k_map, cache.k.data, row_bytes, rows) ||
      !make_map(v_map, cache.v.data, row_bytes, rows)) {
    return false;
  }
  constexpr int kStageBytes = kWarps * kStages * 2 * (D::kTileBytes + D::kScaleBytes) + 1024;
  const int bytes = kStageBytes + (p.num_sequences + 1) * 4;
  const auto kernel = decode_kernel<kFp8, kWidth, kWarps, kStages>;
  static const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStageBytes + (kMaxSequences + 1) * 4);
  check(status, "attention");
  kernel<<<static_cast<unsigned>(context.num_multiprocessors()), 32 * kWarps,
           static_cast<size_t>(bytes), context.stream()>>>(p, k_map, v_map);
  check_launch("attention");
  return true;
}

}  // namespace

bool attention_decode(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  const int width = p.keys.width;
  const bool fp8 = cache.k.dtype == tensor::DType::kE4M3;
  if (cache.page_size() != kPageKeys || p.group > 8 || p.num_sequences > kMaxSequences ||
      !cache.k.contiguous() || !cache.v.contiguous() || p.q_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(p.q) % 16 != 0) {
    return false;
  }
  if (fp8 && width == 128) return launch<true, 128, 6, 2>(context, p, cache);
  if (!fp8 && width == 128) return launch<false, 128, 3, 2>(context, p, cache);
  if (!fp8 && width == 64) return launch<false, 64, 6, 2>(context, p, cache);
  return false;
}

}  // namespace octet::cuda
