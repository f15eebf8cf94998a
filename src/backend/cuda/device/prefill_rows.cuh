// What every consumer of a block of a prefill kernel does: a warpgroup with 64 query rows of an
// item. A lane has, of the 16 rows of its warp, rows h = 0, 1 (lane / 4 + 8 h) and columns 8 j + 2
// t, 8 j + 2 t + 1 with t = lane % 4, of scores and of results: register 4 j + 2 h + e is column 8
// j + 2 t + e. Queries and results come and go by 16-byte pieces, of which the lane takes, of the
// same two rows, those with piece % 4 = t.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

template <class Layout>
class PrefillRows {
  static constexpr int kWidth = Layout::kWidth;

 protected:
  static constexpr int kPieces = kWidth / 32;  // of a row that a lane takes
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(item.first_row + 64 * group_, h);
      const bool inside = row <= item.last_row;
      const Bf16* from = p_.q;
      if (inside) {
        const PrefillRow at = row_at(item, row);
        from += at.token * p_.q_stride + at.head * kWidth + piece_of(0) * 8;
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) copy_async_16(fetched_query(h, i), from + 32 * i, inside);
    }
    copy_async_commit();
  }

  // Stores an item's rows.
  __device__ void write(const PrefillItem& item) {
    warpgroup_sync(1 + group_);  // the queries are no longer used
    write(item, query_tile() + warp_ * (16 * kWidth * 2));
  }
  // By way of room for the warp's 16 rows in shared memory.
  __device__ void write(const PrefillItem& item, uint32_t staged) {
    const int first_row = item.first_row + 64 * group_;
    if (first_row > item.last_row) return;
    // The rows as BF16, piece c of row r at c ^ (r % 8).
    const float shares[2] = {share_of(total_sum_[0]), share_of(total_sum_[1])};
    const uint32_t to = staged + lane_ % 16 * (2 * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 2) {
      uint32_t words[4];  // of piece j and the next one, each of both rows
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &out_[4 * j + 2 * i];
        words[i] = pack_bf16(pair[0] * shares[i % 2], pair[1] * shares[i % 2]);
      }
      store_matrices(to + (((j + lane_ / 16) ^ (lane_ % 8)) << 4), words);
    }
    __syncwarp();
    const int swizzle = lane_ / 4;
    staged += lane_ / 4 * (2 * kWidth);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first_row, h);
      if (row > item.last_row) continue;
      const PrefillRow at = row_at(item, row);
      if (lane_ % 4 == 0) write_lse(p_, at.token, at.head, total_maximum_[h], total_sum_[h]);
      Bf16* out = p_.out + at.token * p_.out_stride + at.head * kWidth + piece_of(0) * 8;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint32_t words[4];
        load_shared(staged + h * (16 * kWidth) + ((piece_of(i) ^ swizzle) << 4), words);
        *reinterpret_cast<uint4*>(out + 32 * i) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
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
  __device__ int piece_of(int i) const { return 4 * i + lane_ % 4; }
  // Piece i of the lane's row h, as it lay.
  __device__ uint32_t fetched_query(int h, int i) const {
    return base_ + Layout::kFetched + (group_ * 4 + warp_) * Layout::kFetchedStride +
           ((h * kPieces + i) * 32 + lane_) * 16;
  }

  // Which of the lane's 16 columns of `tile` row h sees, a bit each.
  __device__ unsigned seen(int h, int tile) const {
    // Of columns 8 j and 8 j + 1 those before column `end`, counted from the lane's own first one.
    const auto before = [](int end) {
      const int inside = max(0, min(end, kTileKeys));
      return (1u << (inside / 8 * 2 + min(inside % 8, 2))) - 1;
    };
    const int end = position_[h] + 1 - tile - 2 * (lane_ % 4);
    return before(end) & ~(!Layout::kWindowed || p_.window == 0 ? 0 : before(end - p_.window));
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
};

}  // namespace octet::cuda
