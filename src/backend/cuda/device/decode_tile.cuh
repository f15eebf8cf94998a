// Decoding's arithmetic on one tile of BF16 pages, by a warp: keys are the wide operand of the
// matrix units (S = K Qᵀ, O = Vᵀ P) and eight query rows the narrow one. The bytes are those of
// AttentionTile.
#pragma once

#include "backend/cuda/device/decode_walk.cuh"
#include "backend/cuda/device/mma.cuh"

namespace octet::cuda {

using DecodeWalk = Walk<8>;
inline constexpr int kTilePages = kTileKeys / kPageKeys;
inline constexpr int kPanelBytes = kTileKeys * 128;  // a tile's keys, 128 bytes of each

// Row r of a fragment of eight is key_of(r): so eight neighbouring lanes load from all banks.
__device__ constexpr int key_of(int row) {
  return (row & 1) << 2 | (row & 4) >> 1 | (row & 2) >> 1;
}

// Over the lanes that share a column.
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

template <int kWidth>
struct Decode {
  static constexpr int kPanels = kWidth * 2 / 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;  // of keys, and of values
  static constexpr int kSteps = kWidth / 16;
  static constexpr int kMTiles = kWidth / 16;                   // of 16 head elements
  static constexpr int kPageBytes = kPanels * kPageKeys * 128;  // of a page's head

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

  // M-tiles go in passes of four, a panel each.
  static constexpr int kPasses = kMTiles / 4;
  __device__ static int element_of(int m, int half, int g) {
    const int pass = m / 4, within = 2 * (m % 4) + half;
    return 64 * pass + 8 * key_of(g) + within;
  }

  // The row of query head g: B fragments in the order of AttentionTile::load_queries.
  __device__ static void load_query(const Bf16* row, int lane, uint32_t (&q)[kSteps][2]) {
    const int t = lane % 4;
#pragma unroll
    for (int piece = 0; piece < kSteps / 2; ++piece) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (row != nullptr) words = *reinterpret_cast<const uint4*>(row + 32 * piece + 8 * t);
      q[2 * piece][0] = words.x, q[2 * piece][1] = words.y;
      q[2 * piece + 1][0] = words.z, q[2 * piece + 1][1] = words.w;
    }
  }

  // weights[b][h][e] = q · k, of key 16 b + 8 h + key_of(g) and query 2t + e.
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
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint32_t a[4] = {l[2 * s], h[2 * s], l[2 * s + 1], h[2 * s + 1]};
          mma_16x8x16<false>(c, a, q[2 * piece + s][0], q[2 * piece + s][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[b][i / 2][i % 2] = c[i];
    }
  }

  // Scores, softmax weights and the fold of maximum and sums, as AttentionTile::weigh.
  __device__ static void weigh(int lane, int first, int last, float factor, State& state,
                               float (&weights)[4][2][2], Fold (&folds)[2]) {
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
          weights[b][h][e] *= factor;
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
          weights[b][h][e] = exp2_flushing(weights[b][h][e] - shift[e]);
          sum[e] += weights[b][h][e];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) state.sum[e] = fold(folds[e], state.sum[e], sum[e]);
  }

  // Adds the weighted values, as AttentionTile::add_values.
  __device__ static void add_values(const char* values, int lane, float (&weights)[4][2][2],
                                    const Fold (&folds)[2], State& state) {
    const int g = lane / 4, t = lane % 4;
    uint32_t p[4][2];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[b][h] = transpose_8x8(pack_bf16(weights[b][h][0], weights[b][h][1]));
      }
    }
    // Keys t and t + 4 of eight are neighbours in the order of the fragments.
    const char* at = values + t * 128 + ((key_of(g) ^ t) << 4);
    const int flip = 512 + ((key_of(g) ^ (t + 4)) << 4) - ((key_of(g) ^ t) << 4);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const char* from = at + pass * kPanelBytes;
      float acc[4][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t w[4][4];  // of rows t, t + 4, t + 8, t + 12
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 words = *reinterpret_cast<const uint4*>(from + b * 2048 + i / 2 * 1024 +
                                                              (i % 2 != 0 ? flip : 0));
          w[i][0] = words.x, w[i][1] = words.y, w[i][2] = words.z, w[i][3] = words.w;
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint32_t a[4] = {__byte_perm(w[0][word], w[1][word], 0x5410),
                                 __byte_perm(w[0][word], w[1][word], 0x7632),
                                 __byte_perm(w[2][word], w[3][word], 0x5410),
                                 __byte_perm(w[2][word], w[3][word], 0x7632)};
          mma_16x8x16<false>(acc[word], a, p[b][0], p[b][1]);
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& out = state.out[4 * pass + m][i];
          out = fold(folds[i % 2], out, acc[m][i]);
        }
      }
    }
  }

  // (maximum, sum) and values of the chunk for the rows that the lane's columns are.
  __device__ static void write(const AttentionProblem& p, const DecodeWalk& walk, int lane,
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

}  // namespace octet::cuda
