// What every consumer of a block of a prefill kernel does: a warpgroup with 64 query rows of an
// item. A lane has, of the 16 rows of its warp, rows h = 0, 1 (lane / 4 + 8 h) and columns 8 j + 2
// t, 8 j + 2 t + 1 with t = lane % 4, of scores and of results: register 4 j + 2 h + e is column 8
// j + 2 t + e.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

template <class Layout>
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

  // Of the lane's rows; maximum in units of log 2.
  int position_[2];
  float factor_[2];
  float total_maximum_[2], total_sum_[2];
  float out_[kOut];

 public:
  __device__ PrefillRows(const PrefillProblem& p, char* shared)
      : p_(p),
        shared_(shared),
        base_(shared_address(shared)),
        group_(uniform(static_cast<int>(threadIdx.x / 128))),
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32) {}

  // Starts to copy the warp's queries as they lie. A lane copies what it will read itself.
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

  // Stores an item's rows.
  __device__ void write(const PrefillItem& item) {
    const int first_row = item.first_row + 64 * group_;
    if (first_row > item.last_row) return;
    // The warp's rows as BF16, 16-byte piece c of row r at c ^ (r % 8); then they go by pieces.
    const uint32_t staged = staging();
    warpgroup_sync(1 + group_);  // the queries are no longer used
    const uint32_t own = staged + lane_ / 4 * (2 * kWidth) + lane_ % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float share = share_of(total_sum_[h]);
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        const int piece = j / 8 * 8 + (j % 8 ^ lane_ / 4);
        store_shared(own + piece * 16 + h * (16 * kWidth),
                     pack_bf16(out_[4 * j + 2 * h] * share, out_[4 * j + 2 * h + 1] * share));
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
  __device__ int row_of(int first_row, int h) const {
    return first_row + warp_ * 16 + lane_ / 4 + 8 * h;
  }
  __device__ int query_row(int pass) const {
    return warp_ * 16 + pass * (32 / kQueryLanes) + lane_ / kQueryLanes;
  }
  __device__ uint32_t fetched_query(int pass) const {
    return base_ + Layout::kFetched + (group_ * 4 + warp_) * Layout::kFetchedStride +
           (pass * 32 + lane_) * 16;
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
  // What a row does not see leaves it as it is: the values are +0, and x × 1 − 0 is x.
  __device__ static Fold fold_seen(float old_maximum, float new_maximum) {
    Fold folding = fold_of(old_maximum, new_maximum);
    if (new_maximum == -INFINITY) folding.new_weight = -0.0f;
    return folding;
  }
  __device__ void place_rows(const PrefillItem& item, int first_row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position_[h] = item.position_of(p_, min(row_of(first_row, h), item.last_row));
      total_maximum_[h] = -INFINITY;
      total_sum_[h] = 0;
    }
  }

 private:
  struct PrefillRow {
    int64_t token;
    int head;
  };
  __device__ PrefillRow row_at(const PrefillItem& item, int row) const {
    const int token = p_.token_of(row);
    return {item.first_token + token, item.head * p_.group + row - token * p_.group};
  }
  // Where the queries of the warp's rows lay.
  __device__ uint32_t staging() const { return query_tile() + warp_ * (16 * kWidth * 2); }
};

}  // namespace octet::cuda
