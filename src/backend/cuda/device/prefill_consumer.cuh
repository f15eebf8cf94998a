// A consumer of a block of the prefill kernel: a warpgroup with 64 query rows. A lane has, of the
// 16 rows of its warp, rows h = 0, 1 (lane / 4 + 8 h) and columns 8 j + 2 t, 8 j + 2 t + 1 with t =
// lane % 4, of scores and of results.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"

namespace octet::cuda {

template <bool kFp8, int kWidth>
class PrefillConsumer {
  using Layout = PrefillLayout<kFp8, kWidth>;
  using Place = RingPlace<Layout::kSlots>;
  static constexpr int kSlabs = Layout::kSlabs;
  static constexpr int kQueryLanes = kWidth / 8;  // of a row
  static constexpr int kQueryPasses = 16 * kQueryLanes / 32;

  const PrefillProblem& p_;
  char* shared_;
  uint32_t base_;
  int group_, thread_, warp_, lane_;
  Place place_;

  // Of the lane's rows.
  int position_[2];
  float factor_[2];
  // The chunk so far: maximum in units of log 2, sums of the keys 2 t and 2 t + 1 modulo 8.
  float maximum_[2], sum_[2][2];
  float total_maximum_[2], total_sum_[2];
  float out_[kSlabs][32];
  // The tile: its scores, then weights; the factors of what was and of the tile's own values when
  // they are folded.
  float scores_[32];
  uint32_t weights_[4][4];
  float old_weight_[2], new_weight_[2];
  float down_[2];  // FP8, rarely: values are to be multiplied by this first

 public:
  __device__ PrefillConsumer(const PrefillProblem& p, char* shared)
      : p_(p),
        shared_(shared),
        base_(shared_address(shared)),
        group_(uniform(static_cast<int>(threadIdx.x / 128))),
        thread_(threadIdx.x % 128),
        warp_(thread_ / 32),
        lane_(threadIdx.x % 32) {}

  // Starts to copy the warpgroup's queries as they lie to where the last item's are no longer used.
  __device__ void fetch(const PrefillItem& item) const {
    warpgroup_sync(1 + group_);
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) {
      const int row = item.first_row + 64 * group_ + query_row(i);
      const int token = p_.token_of(row), head = item.head * p_.group + row - token * p_.group;
      const bool inside = row <= item.last_row;
      const Bf16* from = p_.q;
      if (inside) {
        from += (item.first_token + token) * p_.q_stride + head * kWidth + lane_ % kQueryLanes * 8;
      }
      copy_async_16(fetched_query(i), from, inside);
    }
    copy_async_commit();
  }

  // Computes the item's rows; `write` then stores them.
  __device__ void run(const PrefillItem& item) {
    const int first_row = item.first_row + 64 * group_;
    const int last_row = min(first_row + 63, item.last_row);
    if (first_row > last_row) {
      copy_async_wait<0>();
      for (int tile = item.begin; tile < item.limit; tile += kTileKeys) skip_tile();
      return;
    }
    place_queries(item, first_row);
    const int begin = uniform(item.begin_of(p_, first_row));
    const int limit = uniform(item.position_of(p_, last_row) + 1);
    // All rows see all of the tiles in [whole_begin, whole_end).
    const int whole_begin = p_.window == 0 ? 0 : limit - p_.window;
    const int whole_end = uniform(item.position_of(p_, first_row)) + 2 - kTileKeys;
    int tile = item.begin;
    for (; tile < begin; tile += kTileKeys) skip_tile();
#pragma unroll
    for (int h = 0; h < 2; ++h) total_maximum_[h] = -INFINITY, total_sum_[h] = 0;
    clear();
#pragma unroll
    for (auto& slab : out_) {
#pragma unroll
      for (float& value : slab) value = 0;  // and no register keeps the last item's
    }
    bool first_chunk = true, is_first = true;  // is_first: of the chunk's tiles
    for (; tile < limit; tile += kTileKeys) {
      const Place keys = place_;
      place_.advance();
      const Place values = place_;
      place_.advance();
      acquire(keys);
      multiply_keys(keys);
      weigh(tile, tile < whole_begin || tile >= whole_end, keys, values);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        float products[32];
        multiply_values(values, slab, products);
        if (slab == kSlabs - 1) release(values);
        fold_values(products, slab, is_first);
      }
      if ((tile + kTileKeys) % kChunkKeys == 0 || tile + kTileKeys >= limit) {
        fold_chunk(tile, first_chunk, tile + kTileKeys >= limit);
        first_chunk = false;
      }
      is_first = (tile + kTileKeys) % kChunkKeys == 0;
    }
    for (; tile < item.limit; tile += kTileKeys) skip_tile();
  }

  __device__ void write(const PrefillItem& item) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(item.first_row + 64 * group_, h);
      if (row > item.last_row) continue;
      const int token = p_.token_of(row);
      const int head = item.head * p_.group + row - token * p_.group;
      Bf16* to =
          p_.out + (item.first_token + token) * p_.out_stride + head * kWidth + lane_ % 4 * 2;
      // A product with the reciprocal is within two units of the quotient's last place: where both
      // sides of that round to the same BF16, it serves.
      const bool none = position_[h] < 0;  // there are no keys: zeros
      const float reciprocal = none ? 0.0f : __frcp_rn(total_sum_[h]);
      const bool usual = total_sum_[h] >= 0x1p-60f && total_sum_[h] <= 0x1p60f;
      unsigned nearest = none || usual ? ~0u : 0u;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float quotient = out_[slab][4 * j + 2 * h + i] * reciprocal;
            nearest = min(nearest, (__float_as_uint(quotient) - 0x7FFCu) & 0xFFFFu);
          }
        }
      }
      if (nearest > 8) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float* pair = &out_[slab][4 * j + 2 * h];
            *reinterpret_cast<uint32_t*>(to + slab * 64 + j * 8) =
                pack_bf16(pair[0] * reciprocal, pair[1] * reciprocal);
          }
        }
      } else {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            store(__fdiv_rn(out_[slab][4 * (j / 2) + 2 * h + j % 2], total_sum_[h]),
                  to + slab * 64 + j / 2 * 8 + j % 2);
          }
        }
      }
      if (lane_ % 4 == 0) {
        write_lse(p_, item.first_token + token, head, total_maximum_[h], total_sum_[h]);
      }
    }
  }

 private:
  __device__ uint32_t query_tile() const {
    return base_ + Layout::kQueries + group_ * Layout::kTileBytes;
  }
  __device__ uint32_t slot(const Place& place) const {
    return base_ + Layout::kRing + place.slot * Layout::kTileBytes;
  }
  __device__ void acquire(const Place& place) const {
    barrier_wait(base_ + Layout::kFull + 8 * place.slot, place.parity);
    if constexpr (!kFp8) fence_async_proxy();  // copies end without a thread that could do it
  }
  __device__ void release(const Place& place) const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(base_ + Layout::kEmpty + 8 * place.slot);
  }
  __device__ void skip_tile() {
    for (int i = 0; i < 2; ++i) {
      acquire(place_);
      release(place_);
      place_.advance();
    }
  }

  __device__ int row_of(int first_row, int h) const {
    return first_row + warp_ * 16 + lane_ / 4 + 8 * h;
  }
  __device__ int query_row(int pass) const {
    return warp_ * 16 + pass * (32 / kQueryLanes) + lane_ / kQueryLanes;
  }
  __device__ uint32_t fetched_query(int pass) const {
    return query_tile() + (query_row(pass) * kQueryLanes + lane_ % kQueryLanes) * 16;
  }
  // The fetched queries into the matrix unit's order; with FP8 keys as FP16 under a power of two of
  // the row's own that factor_ takes back.
  __device__ void place_queries(const PrefillItem& item, int first_row) {
    uint32_t words[kQueryPasses][4];
    copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) load_shared(fetched_query(i), words[i]);
    auto* factors = reinterpret_cast<float*>(shared_ + Layout::kFactors) + group_ * 64;
    warpgroup_sync(1 + group_);
#pragma unroll
    for (int i = 0; i < kQueryPasses; ++i) {
      const int row = query_row(i);
      if constexpr (kFp8) {
        float amax = 0;
#pragma unroll
        for (const uint32_t pair : words[i]) {
          amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(pair << 16)),
                                   fabsf(__uint_as_float(pair & 0xFFFF0000u))));
        }
#pragma unroll
        for (int offset = 1; offset < kQueryLanes; offset *= 2) {
          amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
        }
        const int shift = query_shift(amax);
        const float scale = power_of_two(shift);
        if (lane_ % kQueryLanes == 0) factors[row] = power_of_two(-shift);
#pragma unroll
        for (uint32_t& pair : words[i]) {
          pair = pack_half(__uint_as_float(pair << 16) * scale,
                           __uint_as_float(pair & 0xFFFF0000u) * scale);
        }
      }
      const int piece = lane_ % kQueryLanes;
      const uint32_t slab = query_tile() + piece / 8 * kSlabBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shared(slab + contraction_place<kFp8>(row, piece % 8 * 2 + half), words[i][2 * half],
                     words[i][2 * half + 1]);
      }
    }
    fence_async_proxy();
    warpgroup_sync(1 + group_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float unscale = kFp8 ? factors[warp_ * 16 + lane_ / 4 + 8 * h] : 1.0f;
      factor_[h] = unscale * p_.factor;
      position_[h] = item.position_of(p_, min(row_of(first_row, h), item.last_row));
    }
  }

  // As wgmma_descriptor(from + offset), with the sum in units of 16 bytes.
  __device__ static uint64_t descriptor(uint32_t from, int offset) {
    constexpr uint64_t kRest = wgmma_descriptor(0);
    const uint32_t low = static_cast<uint32_t>(kRest) + (from >> 4) + (offset >> 4);
    return kRest >> 32 << 32 | low;
  }
  __device__ void multiply_keys(const Place& keys) {
    wgmma_hold(scores_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int at = step / 4 * kSlabBytes + step % 4 * 32;
      wgmma_scores<kFp8>(scores_, descriptor(query_tile(), at), descriptor(slot(keys), at),
                         step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(scores_);
  }
  __device__ void multiply_values(const Place& values, int slab, float (&products)[32]) {
    wgmma_hold(products);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      const uint64_t at = descriptor(slot(values), slab * kSlabBytes + step * 2048);
      wgmma_values<kFp8>(products, weights_[step], at, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(products);
  }

  __device__ const float* scales(const Place& place) const {
    return reinterpret_cast<const float*>(shared_ + Layout::kScales) + place.slot * kTileKeys +
           lane_ % 4 * 2;
  }

  // Whether row h sees any of the positions [begin, end).
  __device__ bool sees(int h, int begin, int end) const {
    return position_[h] >= begin && (p_.window == 0 || position_[h] + 1 - p_.window < end);
  }

  // From scores to weights; the chunk's maximum and sums move on. Releases the keys, and waits for
  // the values.
  __device__ void weigh(int tile, bool masked, const Place& keys, const Place& values) {
    const int t = lane_ % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 scale{};
      if constexpr (kFp8) scale = *reinterpret_cast<const float2*>(scales(keys) + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores_[4 * j + e];
        if constexpr (kFp8) score *= e % 2 == 0 ? scale.x : scale.y;
        score *= factor_[e / 2];
      }
    }
    release(keys);
    if (masked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last = position_[h] - tile - 2 * t;
        const int first = p_.window == 0 ? -kTileKeys : last + 1 - p_.window;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int column = i / 2 * 8 + i % 2;
          if (column < first || column > last) scores_[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
        }
      }
    }
    // The fast exponential is exact where no weight is subnormal.
    float shift[2];
    bool in_range = !masked;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest[4], least[4];  // side by side, lest each waits for the one before
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i] = least[i] = scores_[i / 2 * 4 + 2 * h + i % 2];
#pragma unroll
      for (int i = 4; i < 16; ++i) {
        const float score = scores_[i / 2 * 4 + 2 * h + i % 2];
        largest[i % 4] = fmaxf(largest[i % 4], score);
        least[i % 4] = fminf(least[i % 4], score);
      }
      const float maximum = quad_max(
          fmaxf(fmaxf(largest[0], largest[1]), fmaxf(fmaxf(largest[2], largest[3]), -INFINITY)));
      const float minimum = fminf(fminf(least[0], least[1]), fminf(least[2], least[3]));
      shift[h] = maximum == -INFINITY ? 0.0f : maximum;
      in_range &= minimum - maximum >= -126.0f;
      const Fold folding = fold_of(maximum_[h], maximum);
      maximum_[h] = folding.maximum;
      old_weight_[h] = folding.old_weight;
      new_weight_[h] = folding.new_weight;
      // What a row does not see leaves it as it is: the values are +0, and x × 1 − 0 is x.
      if (masked && !sees(h, tile, tile + kTileKeys)) new_weight_[h] = -0.0f;
    }
    acquire(values);
    if (__all_sync(0xFFFFFFFFu, in_range)) {
      weigh_columns<true>(shift, values);
    } else {
      weigh_columns<false>(shift, values);
    }
  }

  template <bool kInRange>  // no weight is zero or subnormal
  __device__ void weigh_columns(const float (&shift)[2], const Place& values) {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int h = i % 4 / 2;
      const float x = scores_[i] - shift[h];
      scores_[i] = kInRange ? exp2_flushing(x) : exp2_fast(x);
      sum[h][i % 2] += scores_[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum_[h][i] = fmaf(sum_[h][i], old_weight_[h], sum[h][i] * new_weight_[h]);
      }
    }
    float up[2] = {1, 1};
    if constexpr (kFp8) {
      // Weights × value scales under a power of two of the row's own largest.
      float top[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(scales(values) + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& weight = scores_[4 * j + e];
          weight *= e % 2 == 0 ? scale.x : scale.y;
          top[e / 2] = fmaxf(top[e / 2], weight);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int power = weight_power(quad_max(top[h]));
        up[h] = power_of_two(-power);
        const float down = power_of_two(power);
        // Both factors of the values are one where no product of theirs can be subnormal.
        const bool one = power >= -60 && (new_weight_[h] >= 0x1p-60f || new_weight_[h] == 0);
        down_[h] = one ? 1.0f : down;
        if (one) new_weight_[h] *= down;
      }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &scores_[4 * (2 * step + r / 2) + 2 * (r % 2)];
        weights_[step][r] = kFp8 ? pack_half(pair[0] * up[r % 2], pair[1] * up[r % 2])
                                 : pack_bf16(pair[0], pair[1]);
      }
    }
  }
  __device__ static float exp2_flushing(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }

  __device__ void fold_values(float (&products)[32], int slab, bool is_first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kFp8 && down_[h] != 1) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          products[4 * j + 2 * h] *= down_[h];
          products[4 * j + 2 * h + 1] *= down_[h];
        }
      }
      if (is_first) {  // x + 0, as of what is folded into nothing
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int at = i / 2 * 4 + 2 * h + i % 2;
          out_[slab][at] = fmaf(products[at], new_weight_[h], 0.0f);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int at = i / 2 * 4 + 2 * h + i % 2;
          out_[slab][at] = fmaf(out_[slab][at], old_weight_[h], products[at] * new_weight_[h]);
        }
      }
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum_[h] = -INFINITY, sum_[h][0] = 0, sum_[h][1] = 0;
  }
  // The chunk that ends with `tile` into the rows' totals, which lie in shared memory; the last
  // leaves them in out_.
  __device__ void fold_chunk(int tile, bool is_first, bool is_last) {
    Fold fold_by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(sum_[h][0] + sum_[h][1]);
      fold_by[h] = fold_of(total_maximum_[h], maximum_[h]);
      if (!sees(h, tile / kChunkKeys * kChunkKeys, tile + kTileKeys)) fold_by[h].new_weight = -0.0f;
      total_maximum_[h] = fold_by[h].maximum;
      total_sum_[h] = fold(fold_by[h], total_sum_[h], sum);
    }
    auto* totals =
        reinterpret_cast<float4*>(shared_ + Layout::kTotals) + group_ * (64 * kWidth / 4) + thread_;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float4& at = totals[(slab * 8 + j) * 128];
        const float4 old = is_first ? float4{} : at;
        float total[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[e] = fold(fold_by[e / 2], total[e], out_[slab][4 * j + e]);
        }
        if (is_last) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out_[slab][4 * j + e] = total[e];
        } else {
          at = float4{total[0], total[1], total[2], total[3]};
        }
      }
    }
    if (!is_last) clear();
  }
};

}  // namespace octet::cuda
