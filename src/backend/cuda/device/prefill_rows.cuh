// What every consumer of a block of a prefill kernel does: a warpgroup with 64 query rows of an
// item, whose tiles are folded into chunks, and those into the rows. A lane has, of the 16 rows of
// its warp, rows h = 0, 1 (lane / 4 + 8 h) and columns 8 j + 2 t, 8 j + 2 t + 1 with t = lane % 4,
// of scores and of results: register 4 j + 2 h + e is column 8 j + 2 t + e.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

// Consumer: place_queries(item, first_row) brings the fetched queries into the matrix unit's order
// and sets factor_; take_tile(tile, masked, is_first) folds a tile into the chunk; skip_tile().
template <class Consumer, class Layout>
class PrefillRows {
  static constexpr int kWidth = Layout::kWidth;

 protected:
  static constexpr int kQueryLanes = kWidth / 8;  // of a row
  static constexpr int kQueryPasses = 16 * kQueryLanes / 32;
  static constexpr int kOut = kWidth / 2;

  const PrefillProblem& p_;
  char* shared_;
  uint32_t base_;
  int group_, thread_, warp_, lane_;

  // Of the lane's rows.
  int position_[2];
  float factor_[2];
  // The chunk so far: maximum in units of log 2, sums of the keys 2 t and 2 t + 1 modulo 8.
  float maximum_[2], sum_[2][2];
  float total_maximum_[2], total_sum_[2];
  float out_[kOut];
  // The factors of what was and of the tile's own values when they are folded.
  float old_weight_[2], new_weight_[2];

 public:
  __device__ PrefillRows(const PrefillProblem& p, char* shared)
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
    auto& consumer = static_cast<Consumer&>(*this);
    const int first_row = item.first_row + 64 * group_;
    const int last_row = min(first_row + 63, item.last_row);
    if (first_row > last_row) {
      copy_async_wait<0>();
      for (int tile = item.begin; tile < item.limit; tile += kTileKeys) consumer.skip_tile();
      return;
    }
    consumer.place_queries(item, first_row);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position_[h] = item.position_of(p_, min(row_of(first_row, h), item.last_row));
    }
    const int begin = uniform(item.begin_of(p_, first_row));
    const int limit = uniform(item.position_of(p_, last_row) + 1);
    // All rows see all of the tiles in [whole_begin, whole_end).
    const int whole_begin = p_.window == 0 ? 0 : limit - p_.window;
    const int whole_end = uniform(item.position_of(p_, first_row)) + 2 - kTileKeys;
    int tile = item.begin;
    for (; tile < begin; tile += kTileKeys) consumer.skip_tile();
#pragma unroll
    for (int h = 0; h < 2; ++h) total_maximum_[h] = -INFINITY, total_sum_[h] = 0;
    clear();
#pragma unroll
    for (float& value : out_) value = 0;       // and no register keeps the last item's
    bool first_chunk = true, is_first = true;  // is_first: of the chunk's tiles
    for (; tile < limit; tile += kTileKeys) {
      consumer.take_tile(tile, tile < whole_begin || tile >= whole_end, is_first);
      if ((tile + kTileKeys) % kChunkKeys == 0 || tile + kTileKeys >= limit) {
        fold_chunk(tile, first_chunk, tile + kTileKeys >= limit);
        first_chunk = false;
      }
      is_first = (tile + kTileKeys) % kChunkKeys == 0;
    }
    for (; tile < item.limit; tile += kTileKeys) consumer.skip_tile();
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
      for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float quotient = out_[4 * j + 2 * h + i] * reciprocal;
          nearest = min(nearest, (__float_as_uint(quotient) - 0x7FFCu) & 0xFFFFu);
        }
      }
      if (nearest > 8) {
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
          const float* pair = &out_[4 * j + 2 * h];
          *reinterpret_cast<uint32_t*>(to + j * 8) =
              pack_bf16(pair[0] * reciprocal, pair[1] * reciprocal);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth / 4; ++j) {
          store(__fdiv_rn(out_[4 * (j / 2) + 2 * h + j % 2], total_sum_[h]),
                to + j / 2 * 8 + j % 2);
        }
      }
      if (lane_ % 4 == 0) {
        write_lse(p_, item.first_token + token, head, total_maximum_[h], total_sum_[h]);
      }
    }
  }

 protected:
  __device__ uint32_t query_tile() const {
    return base_ + Layout::kQueries + group_ * (64 * kWidth * 2);
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

  // Whether row h sees any of the positions [begin, end).
  __device__ bool sees(int h, int begin, int end) const {
    return position_[h] >= begin && (p_.window == 0 || position_[h] + 1 - p_.window < end);
  }
  // The columns of `tile` that row h sees, counted from the lane's own first one.
  struct Seen {
    int first, last;
    __device__ bool operator()(int column) const { return column >= first && column <= last; }
  };
  __device__ Seen seen(int h, int tile) const {
    const int last = position_[h] - tile - 2 * (lane_ % 4);
    return {p_.window == 0 ? -kTileKeys : last + 1 - p_.window, last};
  }
  // Row h's maximum moves on to a tile's.
  __device__ void fold_maximum(int h, int tile, bool masked, float maximum) {
    const Fold folding = fold_of(maximum_[h], maximum);
    maximum_[h] = folding.maximum;
    old_weight_[h] = folding.old_weight;
    new_weight_[h] = folding.new_weight;
    // What a row does not see leaves it as it is: the values are +0, and x × 1 − 0 is x.
    if (masked && !sees(h, tile, tile + kTileKeys)) new_weight_[h] = -0.0f;
  }
  // Row h's result in column pair j moves on.
  __device__ void fold_values(int j, int h, float value0, float value1, bool is_first) {
    float* out = &out_[4 * j + 2 * h];
    if (is_first) {  // x + 0, as of what is folded into nothing
      out[0] = fmaf(value0, new_weight_[h], 0.0f);
      out[1] = fmaf(value1, new_weight_[h], 0.0f);
    } else {
      out[0] = fmaf(out[0], old_weight_[h], value0 * new_weight_[h]);
      out[1] = fmaf(out[1], old_weight_[h], value1 * new_weight_[h]);
    }
  }

 private:
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
    for (int j = 0; j < kWidth / 8; ++j) {
      float4& at = totals[j * 128];
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
