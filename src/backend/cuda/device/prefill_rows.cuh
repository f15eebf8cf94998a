// What every consumer of a block of a prefill kernel does: a warpgroup with 64 query rows of an
// item, whose tiles are folded into chunks, and those into the rows. A lane has, of the 16 rows of
// its warp, rows h = 0, 1 (lane / 4 + 8 h) and columns 8 j + 2 t, 8 j + 2 t + 1 with t = lane % 4,
// of scores and of results: register 4 j + 2 h + e is column 8 j + 2 t + e.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

// Consumer: place_queries() brings the fetched queries into the matrix unit's order
// and sets factor_; take_tile(tile, masked) folds a tile into the chunk; skip_tile().
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
  int group_, warp_, lane_;

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
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32) {}

  // Starts to copy the warp's queries as they lie, beside what `write` has. A lane copies what it
  // will read itself.
  __device__ void fetch(const PrefillItem& item) const {
#pragma unroll 1
    for (int i = 0; i < kQueryPasses; ++i) {
      const int row = item.first_row + 64 * group_ + query_row(i);
      const bool inside = row <= item.last_row;
      const Bf16* from = p_.q;
      if (inside) {
        const PrefillRow at = row_at(item, row);
        from += at.token * p_.q_stride + at.head * kWidth + lane_ % kQueryLanes * 8;
      }
      copy_async_16(fetched_query(i), from, inside);
    }
    copy_async_commit();
  }

  // Computes the fetched item's rows; `write` then stores them.
  __device__ void run(const PrefillItem& item) {
    auto& consumer = static_cast<Consumer&>(*this);
    const int first_row = item.first_row + 64 * group_;
    const int last_row = min(first_row + 63, item.last_row);
    if (first_row > last_row) {
      copy_async_wait<0>();
      skip_tiles(item.begin, item.limit);
      return;
    }
    consumer.place_queries();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position_[h] = item.position_of(p_, min(row_of(first_row, h), item.last_row));
    }
    const int begin = uniform(item.begin_of(p_, first_row));
    const int limit = uniform(item.position_of(p_, last_row) + 1);
    // All rows see all of the tiles in [whole_begin, whole_end).
    const int whole_begin = p_.window == 0 ? 0 : limit - p_.window;
    const int whole_end = uniform(item.position_of(p_, first_row)) + 2 - kTileKeys;
    int tile = skip_tiles(item.begin, begin);
#pragma unroll
    for (int h = 0; h < 2; ++h) total_maximum_[h] = -INFINITY, total_sum_[h] = 0;
    clear();
    bool is_first = true;  // of the chunks
#pragma unroll 1
    for (; tile < limit; tile += kTileKeys) {
      const bool is_last = tile + kTileKeys >= limit;
      consumer.take_tile(tile, tile < whole_begin || tile >= whole_end);
      if ((tile + kTileKeys) % kChunkKeys == 0 || is_last) {
        fold_chunk(is_first, is_last);
        is_first = false;
      }
    }
    skip_tiles(tile, item.limit);
  }

  __device__ void write(const PrefillItem& item) {
    const int first_row = item.first_row + 64 * group_;
    // The warp's rows as BF16, 16-byte piece c of row r at c ^ (r % 8); then they go by pieces.
    const uint32_t staged = warp_totals();
    const uint32_t own = staged + lane_ / 4 * (2 * kWidth) + lane_ % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      divide(h);
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        const int piece = j / 8 * 8 + (j % 8 ^ lane_ / 4);
        store_shared(own + piece * 16 + h * (16 * kWidth),
                     pack_bf16(out_[4 * j + 2 * h], out_[4 * j + 2 * h + 1]));
      }
      if (lane_ % 4 == 0 && row_of(first_row, h) <= item.last_row) {
        const PrefillRow to = row_at(item, row_of(first_row, h));
        write_lse(p_, to.token, to.head, total_maximum_[h], total_sum_[h]);
      }
    }
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < kQueryPasses; ++i) {
      const int row = query_row(i), piece = lane_ % kQueryLanes;
      if (first_row + row > item.last_row) continue;
      uint32_t words[4];
      load_shared(staged + row % 16 * (2 * kWidth) + ((piece ^ row % 8) << 4), words);
      const PrefillRow to = row_at(item, first_row + row);
      *reinterpret_cast<uint4*>(p_.out + to.token * p_.out_stride + to.head * kWidth + piece * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
  }

 protected:
  __device__ uint32_t query_tile() const {
    return base_ + Layout::kQueries + group_ * (64 * kWidth * 2);
  }
  // Where the warp's totals lie, or, between two items, what it writes and then what it fetches.
  __device__ uint32_t warp_totals() const {
    return base_ + Layout::kTotals + (group_ * 4 + warp_) * (16 * kWidth * 4);
  }
  __device__ int row_of(int first_row, int h) const {
    return first_row + warp_ * 16 + lane_ / 4 + 8 * h;
  }
  __device__ int query_row(int pass) const {
    return warp_ * 16 + pass * (32 / kQueryLanes) + lane_ / kQueryLanes;
  }
  __device__ uint32_t fetched_query(int pass) const {
    return warp_totals() + 16 * kWidth * 2 + (pass * 32 + lane_) * 16;
  }

  // Which of the lane's 16 columns of `tile` row h sees, a bit each.
  __device__ unsigned seen(int h, int tile) const {
    // Of columns 8 j and 8 j + 1 those before column `end`, counted from the lane's own first one.
    const auto before = [](int end) {
      const int inside = max(0, min(end, kTileKeys));
      return (1u << (inside / 8 * 2 + min(inside % 8, 2))) - 1;
    };
    const int end = position_[h] + 1 - tile - 2 * (lane_ % 4);
    return before(end) & ~(p_.window == 0 ? 0 : before(end - p_.window));
  }
  // Row h's maximum moves on to a tile's.
  __device__ void fold_maximum(int h, float maximum) {
    const Fold folding = fold_seen(maximum_[h], maximum);
    maximum_[h] = folding.maximum;
    old_weight_[h] = folding.old_weight;
    new_weight_[h] = folding.new_weight;
  }
  // The results from register `first` on move on by the tile's own.
  template <int kCount>
  __device__ void fold_values(int first, const float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int h = i % 4 / 2;
      out_[first + i] = fmaf(out_[first + i], old_weight_[h], values[i] * new_weight_[h]);
    }
  }

 private:
  // What a row does not see leaves it as it is: the values are +0, and x × 1 − 0 is x.
  __device__ static Fold fold_seen(float old_maximum, float new_maximum) {
    Fold folding = fold_of(old_maximum, new_maximum);
    if (new_maximum == -INFINITY) folding.new_weight = -0.0f;
    return folding;
  }
  struct PrefillRow {
    int64_t token;
    int head;
  };
  __device__ PrefillRow row_at(const PrefillItem& item, int row) const {
    const int token = p_.token_of(row);
    return {item.first_token + token, item.head * p_.group + row - token * p_.group};
  }
  // Row h's results by its sum, as division rounds: a quotient within one unit of its last place,
  // and the remainder, which is exact, times the reciprocal (Markstein).
  __device__ void divide(int h) {
    if (total_sum_[h] == 0) return;  // there are no keys: zeros
    const float sum = total_sum_[h], reciprocal = __frcp_rn(sum);
    bool usual = sum >= 0x1p-60f && sum <= 0x1p60f;
#pragma unroll
    for (int i = 0; i < kOut / 2; ++i) {
      const float x = out_[i / 2 * 4 + 2 * h + i % 2];
      usual &= fabsf(x) >= 0x1p-60f || __float_as_uint(x) == 0;
    }
    if (usual) {
#pragma unroll
      for (int i = 0; i < kOut / 2; ++i) {
        float& x = out_[i / 2 * 4 + 2 * h + i % 2];
        const float quotient = x * reciprocal;
        x = fmaf(fmaf(-quotient, sum, x), reciprocal, quotient);
      }
    } else {
      auto* lane_totals = reinterpret_cast<float*>(shared_ + (warp_totals() - base_)) + lane_;
#pragma unroll
      for (int i = 0; i < kOut / 2; ++i) lane_totals[32 * i] = out_[i / 2 * 4 + 2 * h + i % 2];
#pragma unroll 1
      for (int i = 0; i < kOut / 2; ++i) lane_totals[32 * i] = __fdiv_rn(lane_totals[32 * i], sum);
#pragma unroll
      for (int i = 0; i < kOut / 2; ++i) out_[i / 2 * 4 + 2 * h + i % 2] = lane_totals[32 * i];
    }
  }
  // The first tile that begins at `end` or behind it.
  __device__ int skip_tiles(int tile, int end) {
#pragma unroll 1
    for (; tile < end; tile += kTileKeys) static_cast<Consumer*>(this)->skip_tile();
    return tile;
  }
  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum_[h] = -INFINITY, sum_[h][0] = 0, sum_[h][1] = 0;
#pragma unroll
    for (float& value : out_) value = 0;
  }
  // The chunk into the rows' totals, which lie in shared memory; the last
  // leaves them in out_.
  __device__ void fold_chunk(bool is_first, bool is_last) {
    Fold fold_by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(sum_[h][0] + sum_[h][1]);
      fold_by[h] = fold_seen(total_maximum_[h], maximum_[h]);
      total_maximum_[h] = fold_by[h].maximum;
      total_sum_[h] = fold(fold_by[h], total_sum_[h], sum);
    }
    auto* totals = reinterpret_cast<float4*>(shared_ + (warp_totals() - base_)) + lane_;
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
