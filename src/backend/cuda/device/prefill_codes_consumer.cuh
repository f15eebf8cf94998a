// A consumer of a block of the prefill kernel over E4M3 pages: the class of attention_codes.cuh by
// wgmma's FP8 products. A chunk's scores lie in registers all at once.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_codes.cuh"
#include "backend/cuda/device/prefill_rows.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"

namespace octet::cuda {

template <class Layout>
class CodesConsumer : public PrefillRows<Layout> {
  static constexpr int kWidth = Layout::kWidth;
  static constexpr int kTiles = kChunkKeys / kTileKeys;
  static constexpr bool kWindowed = Layout::kWindowed;
  using Rows = PrefillRows<Layout>;
  using Rows::base_, Rows::lane_, Rows::shared_, Rows::factor_, Rows::out_, Rows::total_maximum_,
      Rows::total_sum_;

  RingPlace<Layout::kStages> place_;
  // Of the chunk: scores of each half, then softmax weights; then those' terms, by step of 32 keys.
  float scores_[kTiles / 2][64];
  uint32_t weights_[kTiles][2][2][4];  // tile, term (low, high), step

 public:
  using Rows::Rows;

  // All items of the block. While the first keys of one are multiplied, the rows of the one before
  // are written and the queries of the next one asked for. Items are read from the ring again
  // after the chunks: in registers they would push out what those need.
  template <class Schedule>
  __device__ void consume(Schedule& schedule) {
    PrefillItem item = schedule.next();
    if (item.sequence >= 0) this->fetch(item);
    bool is_first = true;
    for (; item.sequence >= 0; item = schedule.before(0), is_first = false) {
      copy_async_wait<0>();
      if (item.first_row + 64 * this->group_ <= item.last_row) place_queries();
      start_chunk();
      if (!is_first) this->write(schedule.before(1), staging());
      const PrefillItem current = schedule.before(0);
      item = schedule.next();
      if (item.sequence >= 0) this->fetch(item);
      run(current);
    }
    if (!is_first) this->write(schedule.before(1), staging());
  }

 private:
  // Computes the item's rows, of which the first chunk's scores are under way.
  __device__ void run(const PrefillItem& item) {
    const int first_row = item.first_row + 64 * this->group_;
    const int last_row = min(first_row + 63, item.last_row);
    const bool none = first_row > last_row;
    int chunk = item.begin / kChunkKeys * kChunkKeys;
    if (none) {
      wgmma_wait<0>();
      for (; chunk < item.limit; chunk += kChunkKeys) {
        wait(Layout::kKeysHere);
        release(Layout::kKeysEmpty);
        wait(Layout::kValuesReady);
        release(Layout::kValuesEmpty);
        place_.advance();
      }
      return;
    }
    this->place_rows(item, first_row);
#pragma unroll
    for (float& value : out_) value = 0;
    const int begin = kWindowed ? uniform(item.begin_of(this->p_, first_row)) : 0;
    const int limit = uniform(item.position_of(this->p_, last_row) + 1);
    // All rows see all keys in [whole_begin, whole_end).
    const int whole_begin = kWindowed ? limit - this->p_.window : 0;
    const int whole_end = uniform(item.position_of(this->p_, first_row)) + 1;
#pragma unroll 1
    for (;;) {
      if ((!kWindowed || chunk >= whole_begin) && chunk + kChunkKeys <= whole_end) {
        take_chunk<true>(chunk, begin, limit, whole_begin, whole_end);
      } else {
        take_chunk<false>(chunk, begin, limit, whole_begin, whole_end);
      }
      place_.advance();
      chunk += kChunkKeys;
      if (chunk >= item.limit) break;
      start_chunk();
    }
  }

  // Room for the warp's rows: its fetched queries, once they are placed.
  __device__ uint32_t staging() const {
    return base_ + Layout::kFetched + (this->group_ * 4 + this->warp_) * Layout::kFetchedStride;
  }

  __device__ void wait(int barriers) const {
    barrier_wait(base_ + barriers + 8 * place_.slot, place_.parity);
  }
  __device__ void release(int barriers) const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(base_ + barriers + 8 * place_.slot);
  }

  // The terms of the fetched queries.
  __device__ void place_queries() {
    warpgroup_sync(1 + this->group_);  // the last item's are no longer used
    uint32_t words[2][Rows::kPieces][4];
    float amax[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t most = 0;  // magnitudes in pairs
#pragma unroll
      for (int i = 0; i < Rows::kPieces; ++i) {
        load_shared(this->fetched_query(h, i), words[h][i]);
#pragma unroll
        for (const uint32_t pair : words[h][i]) most = largest_magnitudes(most, pair);
      }
      amax[h] = fmaxf(__uint_as_float(most << 16), __uint_as_float(most & 0xFFFF0000u));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) amax[h] = quad_max(amax[h]);
    const int column = this->piece_of(0) * 8;
    const uint32_t to =
        this->query_tile() + slab_chunk(this->row_of(0, 0), column / 16) + column % 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int power = query_power(amax[h]);
      factor_[h] = power_of_two(-power) * this->p_.factor;
      const float up = power_of_two(power);
#pragma unroll
      for (int i = 0; i < Rows::kPieces; ++i) {
        const QueryTerms terms = query_terms(words[h][i], up);
        const auto store = [&](int term, const uint32_t(&codes)[2]) {
          const int at = term * kWidth + 32 * i;  // of the row's 2 kWidth bytes, from `to` on
          store_shared((to ^ at % 128) + at / 128 * kSlabBytes + h * (8 * 128), codes[0], codes[1]);
        };
        store(0, terms.high);
        store(1, terms.low);
      }
    }
    fence_async_proxy();
    warpgroup_sync(1 + this->group_);
  }

  // Of BF16 pairs, each the larger one of `most` and the other's magnitude; NaN counts for nothing.
  __device__ static uint32_t largest_magnitudes(uint32_t most, uint32_t pair) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(most), "r"(pair & 0x7FFF7FFFu));
    return result;
  }

  // The chunk's part of the rows, which see keys in [begin, limit), and all of them those in
  // [whole_begin, whole_end); without a window both begin at 0. What other tiles hold counts for
  // nothing: weights are zeros there, and values never NaN.
  template <bool kWhole>
  __device__ void take_chunk(int chunk, int begin, int limit, int whole_begin, int whole_end) {
    const auto first_of = [&](int tile) { return chunk + tile * kTileKeys; };
    // Whether a row sees any of the tile, from the given 32 keys on.
    const auto is_own = [&](int tile, int step = 0) {
      return kWhole || ((!kWindowed || first_of(tile) + kTileKeys > begin) &&
                        first_of(tile) + 32 * step < limit);
    };
    // Whether a row does not see all of the tile.
    const auto is_cut = [&](int tile) {
      return !kWhole && ((kWindowed && first_of(tile) < whole_begin) ||
                         first_of(tile) + kTileKeys > whole_end);
    };
    wait(Layout::kValuesReady);  // here, lest it parts the instructions between the products
    float largest[2][2];         // of a row's even and odd columns
#pragma unroll
    for (auto& row : largest) row[0] = row[1] = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float2 scales[8];  // the first tile's come while its products are waited for
      if (tile == 0) load_columns(Layout::kKeyScales, tile, scales);
      if (tile == 0) wgmma_wait<1>();
      if (tile == 2) wgmma_wait<0>();
      if (tile % 2 == 0) wgmma_hold(scores_[tile / 2]);
      auto& scores = scores_of(tile);
      if (!is_own(tile)) continue;
      if (tile > 0) load_columns(Layout::kKeyScales, tile, scales);
      scale_columns(scales, scores);
      if (is_cut(tile)) mask(scores, first_of(tile));
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& most = largest[i % 4 / 2][i % 2];
        most = fmaxf(most, scores[i]);
      }
    }
    release(Layout::kKeysEmpty);

    Fold folding[2];
    float shift[2], power[2];  // 2^power of a row's value scales
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float maximum = factor_[h] * quad_max(fmaxf(largest[h][0], largest[h][1]));
      folding[h] = this->fold_seen(total_maximum_[h], maximum);
      total_maximum_[h] = folding[h].maximum;
      shift[h] = maximum == -INFINITY ? 0.0f : -maximum;
    }
    if constexpr (kWhole) {
      power[0] = power[1] = reinterpret_cast<const float*>(shared_ + Layout::kPower)[place_.slot];
    } else if (!kWindowed || chunk >= whole_begin) {  // all rows see what is before their own key
      const float* tops = reinterpret_cast<const float*>(shared_ + Layout::kTops +
                                                         place_.slot * Layout::kScaleBytes);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last = min(this->position_[h] - chunk, kChunkKeys - 1);
        power[h] = power_of_two(value_power(last < 0 ? 0.0f : tops[last]));
      }
    } else {
      const float* tops =
          reinterpret_cast<const float*>(shared_ + Layout::kTileTops) + place_.slot * kTiles;
      float top[2] = {0, 0};
#pragma unroll 1
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!is_own(tile)) continue;
        if (!is_cut(tile)) {
          const float most = tops[tile];
#pragma unroll
          for (float& value : top) value = fmaxf(value, most);
          continue;
        }
        const unsigned seen[2] = {this->seen(0, first_of(tile)), this->seen(1, first_of(tile))};
        const float2* scales = columns(Layout::kValueScales, tile);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 scale = scales[4 * j];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if ((seen[h] >> 2 * j & 1) != 0) top[h] = fmaxf(top[h], scale.x);
            if ((seen[h] >> 2 * j & 2) != 0) top[h] = fmaxf(top[h], scale.y);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) power[h] = power_of_two(value_power(quad_max(top[h])));
    }
    float sum[2][2];  // of row, residue
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // 32 keys of each tile: fewer sums at once
      float sums[2][2][2] = {};             // of 16 keys of each tile, row, residue
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (is_own(tile, step)) {
          weigh<kWhole>(tile, step, shift, power, sums);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) weights_[tile][i / 4][step][i % 4] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float both = sums[0][i / 2][i % 2] + sums[1][i / 2][i % 2];
        sum[i / 2][i % 2] = step == 0 ? both : sum[i / 2][i % 2] + both;
      }
    }
    if (!kWhole && reinterpret_cast<const int*>(shared_ + Layout::kOddScales)[place_.slot] != 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (is_cut(tile)) mask_weights(tile, first_of(tile));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total_sum_[h] = fold(folding[h], total_sum_[h], quad_sum(sum[h][0] + sum[h][1]));
    }
    // The values' power goes into their weight in the fold: neither that product nor the one with
    // the unit's sums, multiples of 2^-18, is rounded, unless the weight leaves normal numbers.
    bool apart = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float weight = folding[h].new_weight;
      apart |= weight != 0 && weight * power[h] < 0x1p-126f;
    }
    apart = __any_sync(0xFFFFFFFFu, apart);
#pragma unroll
    for (int h = 0; h < 2; ++h) folding[h].new_weight *= apart ? 1.0f : power[h];
    // A slab of columns is folded while the next one is multiplied.
    const auto fold_slab = [&](int slab, float(&sums)[32]) {
      if (apart) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i] *= power[i % 4 / 2];
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& out = out_[32 * slab + i];
        out = fold(folding[i % 4 / 2], out, sums[i]);
      }
    };
    const uint32_t from = base_ + Layout::kValues + place_.slot * Layout::kChunkBytes;
    const bool both = is_own(2) || is_own(3);
    float values[2][32];  // of the halves of the chunk
    start_values(from, 0, 0, true, values[0]);
    start_values(from, 0, 1, both, values[1]);
    wgmma_wait<0>();
    wgmma_hold(values[0]);
    wgmma_hold(values[1]);
#pragma unroll
    for (int i = 0; i < 32; ++i) values[0][i] += values[1][i];
    if constexpr (kWidth == 128) {
      start_values(from, 1, 0, true, values[1]);
      fold_slab(0, values[0]);
      start_values(from, 1, 1, both, values[0]);
      wgmma_wait<0>();
      wgmma_hold(values[0]);
      wgmma_hold(values[1]);
#pragma unroll
      for (int i = 0; i < 32; ++i) values[0][i] += values[1][i];
    }
    release(Layout::kValuesEmpty);
    fold_slab(kWidth / 64 - 1, values[0]);
  }

  // The matrix descriptor of an operand from a shared-memory address on.
  template <int kSwizzle>
  __device__ static uint64_t descriptor(uint32_t address, int offset) {
    return codes_descriptor<kSwizzle, Layout::kBlockBytes>(address, offset);
  }
  // Floats of the stage, those of the lane's first columns of a tile; the next ones are four on.
  __device__ const float2* columns(int offset, int tile) const {
    return reinterpret_cast<const float2*>(shared_ + offset + place_.slot * Layout::kScaleBytes) +
           tile * (kTileKeys / 2) + lane_ % 4;
  }
  __device__ void load_columns(int offset, int tile, float2 (&scales)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) scales[j] = columns(offset, tile)[4 * j];
  }
  __device__ static void scale_columns(const float2 (&scales)[8], float (&scores)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] *= i % 2 == 0 ? scales[i / 4].x : scales[i / 4].y;
  }

  // Starts the scores of the stage's chunk.
  __device__ void start_chunk() {
    wait(Layout::kKeysHere);
    const uint32_t keys = base_ + Layout::kKeys + place_.slot * Layout::kChunkBytes;
    start_keys(0, keys);
    start_keys(1, keys);
  }
  // The scores of half a chunk.
  __device__ void start_keys(int half, uint32_t keys) {
    wgmma_hold(scores_[half]);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
      for (int step = 0; step < kWidth / 32; ++step) {
        const int at = (1 - term) * kWidth + step * 32;  // low terms first
        Wgmma<128>::run<Operands::kE4M3>(
            scores_[half], descriptor<128>(this->query_tile(), at / 128 * kSlabBytes + at % 128),
            descriptor<kWidth>(keys, half * (2 * Layout::kTileBytes) + step * 32), term + step > 0);
      }
    }
    wgmma_commit();
  }
  __device__ float (&scores_of(int tile))[32] {
    return *reinterpret_cast<float(*)[32]>(&scores_[tile / 2][tile % 2 * 32]);
  }
  // Hides what the rows do not see of a tile, whose first key is at `first`.
  __device__ void mask(float (&scores)[32], int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned seen = this->seen(h, first);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = scores[i / 2 * 4 + 2 * h + i % 2];
        if ((seen >> i & 1) == 0) score = -INFINITY;
      }
    }
  }
  // Makes the weights of what the rows do not see of a tile zeros also where they are 0 × NaN.
  __device__ void mask_weights(int tile, int first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned seen = this->seen(h, first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 keys
        const uint32_t bytes = (((seen >> 4 * i & 15) * 0x00204081u) & 0x01010101u) * 0xFFu;
#pragma unroll
        for (auto& term : weights_[tile]) term[i / 2][i % 2 * 2 + h] &= bytes;
      }
    }
  }
  // The weights' terms and the values of half a chunk, 64 head elements of them. Where its weights
  // are zeros (not `all`), one step will do; with none at all the compiler could no longer tell
  // which products are under way, and would wait for each.
  __device__ void start_values(uint32_t from, int slab, int half, bool all, float (&values)[32]) {
    wgmma_hold(values);
    wgmma_fence();
    const auto multiply = [&](int step) {  // term, tile of the half, 32 keys
      const int tile = 2 * half + step / 2 % 2;
      const int at = tile * Layout::kTileBytes + step % 2 * 2 * Layout::kBlockBytes;
      wgmma_code_values(values, weights_[tile][step / 4][step % 2],
                        descriptor<0>(from, at + slab * (64 * 16)), step > 0);
    };
    multiply(0);
    if (all) {
#pragma unroll
      for (int step = 1; step < 8; ++step) multiply(step);
    }
    wgmma_commit();
  }
  // From the scores of 32 keys, half `step` of a tile, to the terms of their weights.
  template <bool kWhole>
  __device__ void weigh(int tile, int step, const float (&shift)[2], const float (&power)[2],
                        float (&sums)[2][2][2]) {
    float* scores = &scores_of(tile)[16 * step];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int h = i % 4 / 2;
      scores[i] = exp2_flushing(fmaf(scores[i], factor_[h], shift[h]));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // a key and the eighth after it
      const int at = i / 4 * 8 + i % 4;
      sums[i / 4][i % 4 / 2][i % 2] += scores[at] + scores[at + 4];
    }
    const float2* scales =
        columns(kWhole ? Layout::kReadyScales : Layout::kValueScales, tile) + 16 * step;
    float up[2];  // 2^-power
#pragma unroll
    for (int h = 0; h < 2; ++h) up[h] = __uint_as_float(0x7F000000u - __float_as_uint(power[h]));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 scale = scales[4 * j];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of_key = e % 2 == 0 ? scale.x : scale.y;
        scores[4 * j + e] *= kWhole ? of_key : of_key * up[e / 2];
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* a = &scores[8 * (r / 2) + 2 * (r % 2)];
      const TermPairs one = e4m3_terms(a[0], a[1]), two = e4m3_terms(a[4], a[5]);
      weights_[tile][0][step][r] = one.low | two.low << 16;
      weights_[tile][1][step][r] = one.high | two.high << 16;
    }
  }
};

}  // namespace octet::cuda
