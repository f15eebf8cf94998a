// Decoding on Hopper: warps that walk chunks of single-token sequences. A warp's tiles arrive by
// the tensor memory accelerator, some ahead; keys are the wide operand (S = K Qᵀ, O = Vᵀ P), so
// that a group of up to eight query heads costs one column each.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/bulk_copy.cuh"
#include "backend/cuda/launch.cuh"
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

// A row of queries: a sequence and a query head; sequence −1: none.
struct QueryRow {
  int sequence, head;
};

// Rows of neighbouring sequences that share a chunk are taken eight at a time, by the sequence in
// which the eight begin; a chunk that a sequence has for itself is an item of its own.
__device__ inline int first_eight(const AttentionProblem& p, int member) {
  return (member * p.group + 7) / 8;
}
struct ItemCounts {
  int shared_chunks, eights, own_first, own_end;  // eights to each shared chunk; own chunks
  __device__ ItemCounts(const AttentionProblem& p, int sequence) {
    const ChunkRange chunks = chunks_of(p, sequence);
    shared_chunks = chunks_shared(p, sequence);
    const int member = shared_chunks > 0 ? sequence - p.shared_first[sequence] : 0;
    eights = first_eight(p, member + 1) - first_eight(p, member);
    own_first = max(chunks.begin, shared_chunks);
    own_end = max(chunks.end, own_first);
  }
  __device__ int total() const { return shared_chunks * eights + own_end - own_first; }
};
template <int kThreads>
__device__ void count_items(const AttentionProblem& p, int* first) {
  prefix_sums<kThreads>(
      p.num_sequences, [&](int s) { return ItemCounts(p, s).total(); }, first);
}

// A walk over the items: a chunk and a key/value head of up to eight query rows.
struct Walk {
  int index, sequence, chunk, head;
  int begin, end, limit, first_key;  // keys
  int leader, first_row;  // shared: row r is head r % group of sequence leader + r / group
  bool shared;

  // To item `next`, at or behind the current one; false: there is none.
  __device__ bool to(const AttentionProblem& p, const int* first, int next, int lane) {
    index = next;
    const int flat = index / p.keys.heads;
    if (flat >= first[p.num_sequences]) return false;
    head = index - flat * p.keys.heads;
    sequence = find_sequence(first, p.num_sequences, flat, sequence, lane);
    const ItemCounts counts(p, sequence);
    const int within = flat - first[sequence], num_shared = counts.shared_chunks * counts.eights;
    shared = within < num_shared;
    if (shared) {
      leader = p.shared_first[sequence];
      chunk = within / counts.eights;
      first_row = 8 * (first_eight(p, sequence - leader) + within - chunk * counts.eights);
      limit = (chunk + 1) * kChunkKeys;
      first_key = 0;
    } else {
      leader = sequence;
      chunk = counts.own_first + within - num_shared;
      first_row = 0;
      limit = p.context_lengths[sequence];
      first_key = p.window > 0 ? max(0, limit - p.window) : 0;
    }
    begin = max(chunk * kChunkKeys, first_key / kTileKeys * kTileKeys);
    end = min((chunk + 1) * kChunkKeys, limit);
    return true;
  }

  // The lane's page of the chunk.
  __device__ int pages(const AttentionProblem& p, int lane) const {
    const int table = chunk * (kChunkKeys / kPageKeys) + lane;
    const bool inside =
        lane < kChunkKeys / kPageKeys && table < p.keys.max_pages && table * kPageKeys < limit;
    const int page = inside ? p.keys.pages[sequence * p.table_stride + table] : -1;
    return page < p.keys.num_pages ? page : -1;
  }

  __device__ QueryRow row(const AttentionProblem& p, int column) const {
    const int r = first_row + column, member = r / p.group;
    const int s = leader + member, query = head * p.group + r - member * p.group;
    const bool valid =
        shared ? s < p.num_sequences && p.shared_first[s] == leader : column < p.group;
    return {valid ? s : -1, query};
  }
};

template <bool kFp8, int kWidth>
struct Decode {
  static constexpr int kPanels = kWidth * (kFp8 ? 1 : 2) / 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;  // of keys, and of values
  static constexpr int kScaleBytes = kFp8 ? kTileKeys * 4 : 0;
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kMTiles = kWidth / 16;  // of 16 head elements
  // Of a page's head: keys or values, and their scales.
  static constexpr int kPageBytes = kPanels * kPageKeys * 128 + (kFp8 ? kPageKeys * 4 : 0);

  // Registers of a lane (g = lane / 4, t = lane % 4); queries 2t and 2t + 1 are its columns.
  struct State {
    float maximum[2], sum[2];  // sum: of the keys with key % 8 = key_of(g)
    float out[kMTiles][4];     // C registers: element_of(m, e / 2), query 2t + e % 2

    __device__ void clear() {
#pragma unroll
      for (int e = 0; e < 2; ++e) maximum[e] = -INFINITY, sum[e] = 0;
#pragma unroll
      for (auto& tile : out) {
#pragma unroll
        for (float& value : tile) value = 0;
      }
    }
  };

  // M-tiles go in passes of four: FP8 half a 16-byte piece each, of lanes with g & 2 the other half
  // first so that all banks serve; BF16 a panel each.
  static constexpr int kPasses = kMTiles / 4;
  __device__ static int element_of(int m, int half, int g) {
    const int pass = m / 4, within = 2 * (m % 4) + half;
    return kFp8 ? 16 * key_of(g) + 8 * (pass ^ (g >> 1 & 1)) + within
                : 64 * pass + 8 * key_of(g) + within;
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

  // weights[b][h][e] = q · k × key scale, of key 16 b + 8 h + key_of(g) and query 2t + e.
  __device__ static void multiply_keys(const char* keys, const float* k_scales, int lane,
                                       const uint32_t (&q)[kSteps][2], float (&weights)[4][2][2]) {
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
      for (int i = 0; i < 4; ++i) {
        weights[b][i / 2][i % 2] = kFp8 ? c[i] * k_scales[16 * b + 8 * (i / 2) + row] : c[i];
      }
    }
  }

  // Scores, softmax weights and the fold of maximum and sums, as AttentionTile::weigh.
  __device__ static void weigh(int lane, int first, int last, const float (&factor)[2],
                               State& state, float (&weights)[4][2][2], Fold (&folds)[2]) {
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    if (first > 0 || last < kTileKeys - 1) {  // keys that the sequence does not see
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = 16 * b + 8 * h + key_of(lane / 4);
          if (key >= first && key <= last) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) weights[b][h][e] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weights[b][h][e] *= factor[e];
          largest[e] = fmaxf(largest[e], weights[b][h][e]);
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
    uint32_t p[4][2];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = weights[b][h][0] * up[0], y = weights[b][h][1] * up[1];
        p[b][h] = transpose_8x8(kFp8 ? pack_half(x, y) : pack_bf16(x, y));
      }
    }
    // Keys t and t + 4 of eight are neighbours in the order of the fragments.
    const char* at = values + t * 128 + ((key_of(g) ^ t) << 4);
    const int flip = 512 + ((key_of(g) ^ (t + 4)) << 4) - ((key_of(g) ^ t) << 4);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const char* from = at + (kFp8 ? (pass ^ (g >> 1 & 1)) * 8 : pass * kPanelBytes);
      float acc[4][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        constexpr int kWords = kFp8 ? 2 : 4;
        uint32_t w[4][kWords];  // of rows t, t + 4, t + 8, t + 12
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* row = from + b * 2048 + i / 2 * 1024 + (i % 2 != 0 ? flip : 0);
          if constexpr (kFp8) {
            const uint2 words = *reinterpret_cast<const uint2*>(row);
            w[i][0] = words.x, w[i][1] = words.y;
          } else {
            const uint4 words = *reinterpret_cast<const uint4*>(row);
            w[i][0] = words.x, w[i][1] = words.y, w[i][2] = words.z, w[i][3] = words.w;
          }
        }
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          if constexpr (kFp8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const unsigned order = half == 0 ? 0x5140 : 0x7362;
              const uint32_t low = __byte_perm(w[0][word], w[1][word], order);
              const uint32_t high = __byte_perm(w[2][word], w[3][word], order);
              const uint32_t a[4] = {half2_of_e4m3(low), half2_of_e4m3(low >> 16),
                                     half2_of_e4m3(high), half2_of_e4m3(high >> 16)};
              mma_16x8x16<true>(acc[2 * word + half], a, p[b][0], p[b][1]);
            }
          } else {
            const uint32_t a[4] = {__byte_perm(w[0][word], w[1][word], 0x5410),
                                   __byte_perm(w[0][word], w[1][word], 0x7632),
                                   __byte_perm(w[2][word], w[3][word], 0x5410),
                                   __byte_perm(w[2][word], w[3][word], 0x7632)};
            mma_16x8x16<false>(acc[word], a, p[b][0], p[b][1]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& out = state.out[4 * pass + m][i];
          const float value = kFp8 ? acc[m][i] * down[i % 2] : acc[m][i];
          out = fold(folds[i % 2], out, value);
        }
      }
    }
  }

  // (maximum, sum) and values of the chunk for the rows that the lane's columns are.
  __device__ static void write(const AttentionProblem& p, const Walk& walk, int lane,
                               const State& state) {
    const int g = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = column_sum(state.sum[e]);
      const QueryRow row = walk.row(p, 2 * (lane % 4) + e);
      if (row.sequence < 0) continue;
      const int64_t index = chunk_index(p, row.sequence, row.head, walk.chunk);
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

// Where a warp's copies go: a slot for keys or values, its scales, its barrier.
struct Slot {
  uint32_t tile, scales, barrier;
};

// The warp's lanes ask for the keys or the values of a tile, [tile, end) of the walk's chunk;
// `pages` holds the chunk's page numbers, a lane each.
template <class D, bool kFp8>
__device__ void load_tile(const AttentionProblem& p, const CUtensorMap* map, const float* scales,
                          const Walk& walk, int pages, int tile, const Slot& slot, int lane) {
  const int i = lane % kTilePages;
  const int in_chunk = (tile - walk.chunk * kChunkKeys) / kPageKeys + i;
  const int page = __shfl_sync(0xFFFFFFFFu, pages, in_chunk & 31);
  const bool valid = page >= 0 && tile + i * kPageKeys < walk.end;
  const unsigned count = __popc(__ballot_sync(0xFFFFFFFFu, valid) & 0xFu);
  if (lane == 0) barrier_expect(slot.barrier, count * D::kPageBytes);
  __syncwarp();
  const int row = (page * p.keys.heads + walk.head) * kPageKeys;
  if (valid && lane < kTilePages) {
#pragma unroll
    for (int panel = 0; panel < D::kPanels; ++panel) {
      bulk_copy_box(slot.tile + panel * kPanelBytes + i * kPageKeys * 128, map, panel * 128, row,
                    slot.barrier);
    }
  } else if (kFp8 && valid && lane < 2 * kTilePages) {
    bulk_copy(slot.scales + i * kPageKeys * 4, scales + row, kPageKeys * 4, slot.barrier);
  }
}

// Values that nobody wrote must not meet a weight of zero.
template <class D, bool kFp8>
__device__ void clear_values(char* values, float* scales, int first, int lane) {
  for (int r = first + lane / 8; r < kTileKeys; r += 4) {
#pragma unroll
    for (int panel = 0; panel < D::kPanels; ++panel) {
      *reinterpret_cast<uint4*>(values + panel * kPanelBytes + r * 128 + lane % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    if (kFp8 && lane % 8 == 0) scales[r] = 0;
  }
  fence_async_proxy();
  __syncwarp();
}

// The queries of an item and the factors of the lane's two columns.
template <class D>
__device__ void load_queries(const AttentionProblem& p, const Walk& walk, int lane,
                             uint32_t (&q)[D::kSteps][2], float (&factor)[2]) {
  const QueryRow row = walk.row(p, lane / 4);
  const Bf16* from = row.sequence < 0 ? nullptr
                                      : p.q + p.query_offsets[row.sequence] * p.q_stride +
                                            int64_t{row.head} * p.keys.width;
  const float own_factor = D::load_query(from, lane, q) * p.factor;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    factor[e] = __shfl_sync(0xFFFFFFFFu, own_factor, 4 * (2 * (lane % 4) + e));
  }
}

// Every warp walks chunks of its own, tile by tile; the next keys arrive beside the values' part,
// the next values beside the keys'.
template <bool kFp8, int kWidth, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    chunks_kernel(const __grid_constant__ AttentionProblem p,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map) {
  using D = Decode<kFp8, kWidth>;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const at = shared + (base - unaligned);
  // Keys and values of all warps, then their scales, then the sequences' first items.
  constexpr int kTiles = 2 * kWarps * D::kTileBytes, kScales = 2 * kWarps * D::kScaleBytes;
  int* const first = reinterpret_cast<int*>(at + kTiles + kScales);
  count_items<32 * kWarps>(p, first);
  const auto slot_of = [&](int values) {
    const uint32_t index = 2 * warp + values;
    return Slot{base + index * D::kTileBytes, base + kTiles + index * D::kScaleBytes,
                shared_address(barriers + index)};
  };
  const Slot k_slot = slot_of(0), v_slot = slot_of(1);
  if (lane == 0) {
    barrier_init(k_slot.barrier, 1);
    barrier_init(v_slot.barrier, 1);
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();

  const int stride = static_cast<int>(gridDim.x) * kWarps;
  const int worker = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  Walk load{};
  bool loading = load.to(p, first, worker, lane);
  int pages = loading ? load.pages(p, lane) : -1, tile_ahead = load.begin;
  const auto load_keys = [&] {
    if (loading) {
      load_tile<D, kFp8>(p, &k_map, p.keys.k_scales, load, pages, tile_ahead, k_slot, lane);
    }
  };
  const auto load_values = [&] {  // and on to the next tile
    if (!loading) return;
    load_tile<D, kFp8>(p, &v_map, p.keys.v_scales, load, pages, tile_ahead, v_slot, lane);
    tile_ahead += kTileKeys;
    if (tile_ahead < load.end) return;
    loading = load.to(p, first, load.index + stride, lane);
    tile_ahead = load.begin;
    if (loading) pages = load.pages(p, lane);
  };
  load_keys();
  load_values();

  char* const keys = at + (k_slot.tile - base);
  char* const values = at + (v_slot.tile - base);
  auto* const k_scales = reinterpret_cast<float*>(at + (k_slot.scales - base));
  auto* const v_scales = reinterpret_cast<float*>(at + (v_slot.scales - base));
  uint32_t parity = 0;
  Walk walk{};
  for (int index = worker; walk.to(p, first, index, lane); index += stride) {
    uint32_t q[D::kSteps][2];
    float factor[2];
    load_queries<D>(p, walk, lane, q, factor);
    typename D::State state;
    state.clear();
    for (int tile = walk.begin; tile < walk.end; tile += kTileKeys) {
      const int last = walk.limit - 1 - tile;
      float weights[4][2][2];
      Fold folds[2];
      barrier_wait(k_slot.barrier, parity);
      D::multiply_keys(keys, k_scales, lane, q, weights);
      __syncwarp();
      load_keys();
      D::weigh(lane, walk.first_key - tile, last, factor, state, weights, folds);
      barrier_wait(v_slot.barrier, parity);
      if (last < kTileKeys - 1) clear_values<D, kFp8>(values, v_scales, last + 1, lane);
      D::add_values(values, v_scales, lane, weights, folds, state);
      __syncwarp();
      load_values();
      parity ^= 1u;
    }
    D::write(p, walk, lane, state);
  }
}

// For few chunks: four warps take the tiles of one chunk and fold them in order.
template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(128, kFp8 ? 3 : 1)
    split_chunks_kernel(const __grid_constant__ AttentionProblem p,
                        const __grid_constant__ CUtensorMap k_map,
                        const __grid_constant__ CUtensorMap v_map) {
  using D = Decode<kFp8, kWidth>;
  constexpr int kWarps = kChunkKeys / kTileKeys;
  extern __shared__ char shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kWarps];
  __shared__ float maxima[kWarps][8], sums[kWarps][8][8];  // of a tile and column; by residue
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t unaligned = shared_address(shared), base = (unaligned + 1023u) & ~1023u;
  char* const at = shared + (base - unaligned);
  constexpr int kTiles = 2 * kWarps * D::kTileBytes, kScales = 2 * kWarps * D::kScaleBytes;
  int* const first = reinterpret_cast<int*>(at + kTiles + kScales);
  count_items<32 * kWarps>(p, first);
  const uint32_t index_of_slot = 2 * warp;
  const Slot k_slot{base + index_of_slot * D::kTileBytes,
                    base + kTiles + index_of_slot * D::kScaleBytes,
                    shared_address(barriers + index_of_slot)};
  const Slot v_slot{k_slot.tile + D::kTileBytes, k_slot.scales + D::kScaleBytes,
                    k_slot.barrier + 8};
  if (lane == 0) {
    barrier_init(k_slot.barrier, 1);
    barrier_init(v_slot.barrier, 1);
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();
  char* const keys = at + (k_slot.tile - base);
  char* const values = keys + D::kTileBytes;
  auto* const k_scales = reinterpret_cast<float*>(at + (k_slot.scales - base));
  auto* const v_scales = k_scales + D::kScaleBytes / 4;
  // A tile's values [column][kWidth] lie where its keys were.
  const auto tile_values = [&](int w) {
    return reinterpret_cast<float*>(at + 2 * w * D::kTileBytes);
  };
  uint32_t parity = 0;
  Walk walk{};
  for (int index = static_cast<int>(blockIdx.x); walk.to(p, first, index, lane);
       index += static_cast<int>(gridDim.x)) {
    const int pages = walk.pages(p, lane);
    const int tile = walk.chunk * kChunkKeys + warp * kTileKeys;
    const int num_tiles = (walk.end - walk.chunk * kChunkKeys + kTileKeys - 1) / kTileKeys;
    const bool mine = tile >= walk.begin && tile < walk.end;
    typename D::State state;
    state.clear();
    if (mine) {
      load_tile<D, kFp8>(p, &k_map, p.keys.k_scales, walk, pages, tile, k_slot, lane);
      load_tile<D, kFp8>(p, &v_map, p.keys.v_scales, walk, pages, tile, v_slot, lane);
      uint32_t q[D::kSteps][2];
      float factor[2], weights[4][2][2];
      Fold folds[2];
      load_queries<D>(p, walk, lane, q, factor);
      const int last = walk.limit - 1 - tile;
      barrier_wait(k_slot.barrier, parity);
      D::multiply_keys(keys, k_scales, lane, q, weights);
      D::weigh(lane, walk.first_key - tile, last, factor, state, weights, folds);
      barrier_wait(v_slot.barrier, parity);
      if (last < kTileKeys - 1) clear_values<D, kFp8>(values, v_scales, last + 1, lane);
      D::add_values(values, v_scales, lane, weights, folds, state);
      __syncwarp();
      parity ^= 1u;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * t + e;
      if (g == 0) maxima[warp][column] = state.maximum[e];
      sums[warp][column][key_of(g)] = state.sum[e];
      float* to = tile_values(warp) + column * kWidth;
#pragma unroll
      for (int m = 0; m < D::kMTiles; m += 2) {
        *reinterpret_cast<float4*>(to + D::element_of(m, 0, g)) = make_float4(
            state.out[m][e], state.out[m][2 + e], state.out[m + 1][e], state.out[m + 1][2 + e]);
      }
    }
    __syncthreads();
    // 16 threads fold a column, kWidth / 16 elements each.
    const int column = static_cast<int>(threadIdx.x) / 16, part = threadIdx.x % 16;
    const QueryRow row = walk.row(p, column);
    if (row.sequence >= 0) {
      const int64_t to = chunk_index(p, row.sequence, row.head, walk.chunk);
      float maximum = -INFINITY, out[kWidth / 16] = {}, sum[8] = {};
      for (int w = 0; w < num_tiles; ++w) {
        const Fold f = fold_of(maximum, maxima[w][column]);
        maximum = f.maximum;
        const float* from = tile_values(w) + column * kWidth + part * (kWidth / 16);
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) out[i] = fold(f, out[i], from[i]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fold(f, sum[i], sums[w][column][i]);
      }
      if (part == 0) {
        p.chunk_stats[to] = make_float2(maximum, ((sum[0] + sum[1]) + (sum[2] + sum[3])) +
                                                     ((sum[4] + sum[5]) + (sum[6] + sum[7])));
      }
      float* values_to = p.chunk_values + to * kWidth + part * (kWidth / 16);
#pragma unroll
      for (int i = 0; i < kWidth / 16; i += 4) {
        *reinterpret_cast<float4*>(values_to + i) =
            make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
      }
    }
    fence_async_proxy();  // before the copies that overwrite what was written here
    __syncthreads();
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

template <bool kFp8, int kWidth, int kWarps>
bool launch_width(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  using D = Decode<kFp8, kWidth>;
  CUtensorMap k_map, v_map;
  const int64_t rows = cache.k.shape[0] * cache.num_heads() * kPageKeys;
  const int64_t row_bytes = kWidth * (kFp8 ? 1 : 2);
  if (!make_map(k_map, cache.k.data, row_bytes, rows) ||
      !make_map(v_map, cache.v.data, row_bytes, rows)) {
    return false;
  }
  constexpr int kWarpBytes = 2 * (D::kTileBytes + D::kScaleBytes);
  constexpr int kMoreBytes = 1024 + (kMaxSequences + 1) * 4;
  const auto chunks = chunks_kernel<kFp8, kWidth, kWarps>;
  const auto split = split_chunks_kernel<kFp8, kWidth>;
  static const bool ready = allow_shared(chunks, kWarps * kWarpBytes + kMoreBytes) &&
                            allow_shared(split, 4 * kWarpBytes + kMoreBytes);
  (void)ready;
  const auto multiprocessors = static_cast<unsigned>(context.num_multiprocessors());
  const auto more = static_cast<unsigned>(1024 + (p.num_sequences + 1) * 4);
  // So few chunks that their tiles may all go side by side.
  const int64_t most = int64_t{p.num_sequences} * p.num_chunks * p.keys.heads;
  if (most <= 3 * multiprocessors) {
    launch("attention", context,
           {.grid = dim3(static_cast<unsigned>(most)),
            .num_threads = 128,
            .shared_bytes = 4 * kWarpBytes + more},
           split, p, k_map, v_map);
  } else {
    launch("attention", context,
           {.grid = dim3(multiprocessors),
            .num_threads = 32 * kWarps,
            .shared_bytes = kWarps * kWarpBytes + more},
           chunks, p, k_map, v_map);
  }
  return true;
}

}  // namespace

bool attention_decode(Context& context, const AttentionProblem& p, const ops::KvCacheView& cache) {
  const int width = p.keys.width;
  const bool fp8 = cache.k.dtype == tensor::DType::kE4M3;
  if (context.portable() || cache.page_size() != kPageKeys || p.group > 8 ||
      p.num_sequences > kMaxSequences || !cache.k.contiguous() || !cache.v.contiguous() ||
      (fp8 && !cache.k_scale.contiguous()) || (fp8 && !cache.v_scale.contiguous()) ||
      p.q_stride % 8 != 0 || reinterpret_cast<uintptr_t>(p.q) % 16 != 0) {
    return false;
  }
  if (fp8 && width == 128) return launch_width<true, 128, 12>(context, p, cache);
  if (!fp8 && width == 128) return launch_width<false, 128, 6>(context, p, cache);
  if (!fp8 && width == 64) return launch_width<false, 64, 12>(context, p, cache);
  return false;
}

}  // namespace octet::cuda
