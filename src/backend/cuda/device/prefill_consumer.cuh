// A consumer of a block of the prefill kernel over BF16 pages, by wgmma's BF16 products.
#pragma once

#include "backend/cuda/device/prefill_rows.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"

namespace octet::cuda {

template <int kWidth>
class PrefillConsumer : public PrefillRows<PrefillLayout<kWidth>> {
  using Layout = PrefillLayout<kWidth>;
  using Rows = PrefillRows<Layout>;
  using Place = RingPlace<Layout::kSlots>;
  using Rows::base_, Rows::lane_, Rows::factor_, Rows::out_, Rows::total_maximum_, Rows::total_sum_;

  Place place_;
  // The chunk so far: maximum in units of log 2, sums of the keys 2 t and 2 t + 1 modulo 8.
  float maximum_[2], sum_[2][2];
  // The factors of what was and of the tile's own values when they are folded.
  float old_weight_[2], new_weight_[2];
  float scores_[32];  // of the tile, then its weights
  uint32_t weights_[4][4];

 public:
  using Rows::Rows;

  // Computes the fetched item's rows; `write` then stores them.
  __device__ void run(const PrefillItem& item) {
    const int first_row = item.first_row + 64 * this->group_;
    const int last_row = min(first_row + 63, item.last_row);
    copy_async_wait<0>();
    if (first_row > last_row) {
      skip_tiles(item.begin, item.limit);
      return;
    }
    place_queries();
    this->place_rows(item, first_row);
    const int begin = uniform(item.begin_of(this->p_, first_row));
    const int limit = uniform(item.position_of(this->p_, last_row) + 1);
    // All rows see all of the tiles in [whole_begin, whole_end).
    const int whole_begin = this->p_.window == 0 ? 0 : limit - this->p_.window;
    const int whole_end = uniform(item.position_of(this->p_, first_row)) + 2 - kTileKeys;
    int tile = skip_tiles(item.begin, begin);
    clear();
    bool is_first = true;  // of the chunks
#pragma unroll 1
    for (; tile < limit; tile += kTileKeys) {
      const bool is_last = tile + kTileKeys >= limit;
      take_tile(tile, tile < whole_begin || tile >= whole_end);
      if ((tile + kTileKeys) % kChunkKeys == 0 || is_last) {
        fold_chunk(is_first, is_last);
        is_first = false;
      }
    }
    skip_tiles(tile, item.limit);
    if (has_nan(out_)) this->p_.prefilled->found_nan = 1;
  }

 private:
  __device__ void place_queries() {
    warpgroup_sync(1 + this->group_);  // the last item's are no longer used
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = this->row_of(0, h);
#pragma unroll
      for (int i = 0; i < Rows::kPieces; ++i) {
        uint32_t words[4];
        load_shared(this->fetched_query(h, i), words);
        const int piece = this->piece_of(i);
        const uint32_t slab = this->query_tile() + piece / 8 * kSlabBytes;
        store_shared(slab + contraction_place(row, piece % 8 * 2), words[0], words[1]);
        store_shared(slab + contraction_place(row, piece % 8 * 2 + 1), words[2], words[3]);
      }
    }
    fence_async_proxy();
    warpgroup_sync(1 + this->group_);
    factor_[0] = factor_[1] = this->p_.factor;
  }

  __device__ void take_tile(int tile, bool masked) {
    multiply_keys(place_);
    place_.advance();
    weigh(tile, masked);
    acquire(place_);
#pragma unroll
    for (int slab = 0; slab < Layout::kSlabs; ++slab) {
      float products[32];
      multiply_values(place_, slab, products);
      if (slab + 1 == Layout::kSlabs) release(place_);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& out = out_[32 * slab + i];
        out = fmaf(out, old_weight_[i % 4 / 2], products[i] * new_weight_[i % 4 / 2]);
      }
    }
    place_.advance();
  }
  // The first tile that begins at `end` or behind it.
  __device__ int skip_tiles(int tile, int end) {
#pragma unroll 1
    for (; tile < end; tile += kTileKeys) {
      for (int i = 0; i < 2; ++i) {
        acquire(place_);
        release(place_);
        place_.advance();
      }
    }
    return tile;
  }

  __device__ uint32_t slot(const Place& place) const {
    return base_ + Layout::kRing + place.slot * Layout::kTileBytes;
  }
  __device__ void acquire(const Place& place) const {
    barrier_wait(base_ + Layout::kFull + 8 * place.slot, place.parity);
    fence_async_proxy();  // copies end without a thread that could do it
  }
  __device__ void release(const Place& place) const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(base_ + Layout::kEmpty + 8 * place.slot);
  }

  // As wgmma_descriptor(from + offset), with the sum in units of 16 bytes.
  __device__ static uint64_t descriptor(uint32_t from, int offset) {
    constexpr uint64_t kRest = wgmma_descriptor(0);
    const uint32_t low = static_cast<uint32_t>(kRest) + (from >> 4) + (offset >> 4);
    return kRest >> 32 << 32 | low;
  }
  __device__ void multiply_keys(const Place& keys) {
    acquire(keys);
    wgmma_hold(scores_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int at = step / 4 * kSlabBytes + step % 4 * 32;
      wgmma_scores(scores_, descriptor(this->query_tile(), at), descriptor(slot(keys), at),
                   step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(scores_);
    release(keys);
  }
  __device__ void multiply_values(const Place& values, int slab, float (&products)[32]) {
    wgmma_hold(products);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      const uint64_t at = descriptor(slot(values), slab * kSlabBytes + step * 2048);
      wgmma_values(products, weights_[step], at, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(products);
  }

  // From scores to softmax weights; the chunk's maximum and sums move on.
  __device__ void weigh(int tile, bool masked) {
#pragma unroll
    for (int i = 0; i < 32; ++i) scores_[i] *= factor_[i % 4 / 2];
    if (masked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned seen = this->seen(h, tile);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if ((seen >> i & 1) == 0) scores_[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest[4];  // side by side, lest each waits for the one before
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float score = scores_[i / 2 * 4 + 2 * h + i % 2];
        largest[i % 4] = i < 4 ? score : fmaxf(largest[i % 4], score);
      }
      const float maximum = quad_max(
          fmaxf(fmaxf(largest[0], largest[1]), fmaxf(fmaxf(largest[2], largest[3]), -INFINITY)));
      const float shift = maximum == -INFINITY ? 0.0f : maximum;
      const Fold folding = this->fold_seen(maximum_[h], maximum);
      maximum_[h] = folding.maximum;
      old_weight_[h] = folding.old_weight;
      new_weight_[h] = folding.new_weight;
      float sum[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = scores_[i / 2 * 4 + 2 * h + i % 2];
        score = exp2_flushing(score - shift);
        sum[i % 2] += score;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum_[h][i] = fmaf(sum_[h][i], folding.old_weight, sum[i] * folding.new_weight);
      }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &scores_[4 * (2 * step + r / 2) + 2 * (r % 2)];
        weights_[step][r] = pack_bf16(pair[0], pair[1]);
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum_[h] = -INFINITY, sum_[h][0] = 0, sum_[h][1] = 0;
#pragma unroll
    for (float& value : out_) value = 0;
  }
  // The chunk into the rows' totals, which lie in shared memory; the last leaves them in out_.
  __device__ void fold_chunk(bool is_first, bool is_last) {
    Fold fold_by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(sum_[h][0] + sum_[h][1]);
      fold_by[h] = this->fold_seen(total_maximum_[h], maximum_[h]);
      total_maximum_[h] = fold_by[h].maximum;
      total_sum_[h] = fold(fold_by[h], total_sum_[h], sum);
    }
    auto* totals = reinterpret_cast<float4*>(this->shared_ + Layout::kTotals) +
                   (this->group_ * 4 + this->warp_) * (4 * kWidth) + lane_;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      float4& at = totals[32 * j];
      const float4 old = is_first ? float4{} : at;
      float total[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] = fold(fold_by[e / 2], total[e], out_[4 * j + e]);
      if (is_last) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[4 * j + e] = total[e];
      } else {
        at = float4{total[0], total[1], total[2], total[3]};
      }
    }
    if (!is_last) clear();
  }
};

}  // namespace octet::cuda
