// The producers of a block of the prefill kernel: a warpgroup that brings keys and values of the
// tiles, in turn, from their pages into the ring, as 16-bit operands. A thread takes 16 bytes of a
// row in each of several passes over a tile.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

template <class Layout>
struct PrefillRing {
  uint32_t shared;
  RingPlace<Layout::kSlots> place;

  __device__ uint32_t slot() const {
    return shared + Layout::kRing + place.slot * Layout::kTileBytes;
  }
  __device__ uint32_t full() const { return shared + Layout::kFull + 8 * place.slot; }
  __device__ uint32_t empty() const { return shared + Layout::kEmpty + 8 * place.slot; }
};

// BF16 pages: copies need no thread to end. A warp takes 16 rows, which lie side by side in a page.
template <int kWidth>
class PrefillCopier {
  using Layout = PrefillLayout<false, kWidth>;
  static constexpr int kPieces = kWidth / 8;  // of a row
  static constexpr int kPassRows = 32 / kPieces;
  static constexpr int kPasses = 16 / kPassRows;

  const PrefillProblem& p_;
  PrefillRing<Layout> ring_;
  int warp_, row_;  // of the warp's rows in the first pass
  int64_t column_;  // bytes
  int key_places_[2], value_place_;

 public:
  static constexpr int kArrivals = 128;  // at a slot's full barrier

  __device__ PrefillCopier(const PrefillProblem& p, uint32_t shared)
      : p_(p), ring_{shared, {}}, warp_(threadIdx.x % 128 / 32) {
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
    row_ = lane / kPieces;
    column_ = row_ * (kWidth * 2) + piece * 16;
    const int slab = piece / 8 * kSlabBytes, row = 16 * warp_ + row_;
    for (int i = 0; i < 2; ++i) {
      key_places_[i] = slab + contraction_place<false>(row, piece % 8 * 2 + i);
    }
    value_place_ = slab + slab_chunk(row, piece % 8);
  }

  __device__ void run(const PrefillItem& item) {
    PrefillPages pages(p_, item.sequence, item.begin, item.limit);
    const int64_t head = (int64_t{item.head} << p_.keys.page_shift) * (kWidth * 2) + column_;
    for (int tile = item.begin; tile < item.limit; tile += kTileKeys) {
      if (tile % kChunkKeys == 0 && tile != item.begin) pages.enter(tile);
      const int position = tile + 16 * warp_, page = pages.page_of(position);
      const int64_t from = head +
                           int64_t{max(page, 0)} * static_cast<int>(p_.keys.page_stride * 2) +
                           pages.offset_of(position) * (kWidth * 2);
      const int rows = page >= 0 ? item.limit - position - row_ : 0;
      copy<true>(p_.keys.k + from, rows);
      copy<false>(p_.keys.v + from, rows);
    }
  }

 private:
  // Rows from `rows` on are zeros.
  template <bool kKeys>
  __device__ void copy(const char* from, int rows) {
    barrier_wait(ring_.empty(), ring_.place.parity ^ 1);
    const uint32_t slot = ring_.slot();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kPassRows;
      // The row moves chunks within a slab's row only by its last three bits.
      const auto at = [&](int place) { return ((slot + place) ^ (row % 8 << 4)) + row * 128; };
      const bool inside = row < rows;
      const char* piece = from + row * (kWidth * 2);
      if constexpr (kKeys) {
        copy_async_8(at(key_places_[0]), piece, inside);
        copy_async_8(at(key_places_[1]), piece + 8, inside);
      } else {
        copy_async_16(at(value_place_), piece, inside);
      }
    }
    barrier_arrive_after_copies(ring_.full());
    ring_.place.advance();
  }
};

// FP8 pages: codes and scales are copied as they lie, two tiles ahead, then converted to FP16.
template <int kWidth>
class PrefillConverter {
  using Layout = PrefillLayout<true, kWidth>;
  static constexpr int kPasses = Layout::kSlabs * 2;
  static constexpr int kPassRows = kTileKeys / kPasses;

  const PrefillProblem& p_;
  PrefillRing<Layout> ring_;
  RingPlace<2> raw_;
  int warp_, lane_;
  int row_, column_;  // of the tile's first pass
  int key_places_[4], value_places_[2];

 public:
  static constexpr int kArrivals = 4;

  __device__ PrefillConverter(const PrefillProblem& p, uint32_t shared)
      : p_(p), ring_{shared, {}}, warp_(threadIdx.x % 128 / 32), lane_(threadIdx.x % 32) {
    // A warp takes eight rows of a slab, four lanes each, so ordered that the stores of 8 and of 16
    // lanes find different banks.
    const int row = lane_ / 4, slab = warp_ % Layout::kSlabs, piece = lane_ % 4;
    row_ = warp_ / Layout::kSlabs * 8 + row % 4 * 2 + ((row & 1) ^ (row >> 2));
    column_ = slab * 64 + piece * 16;
    for (int i = 0; i < 2; ++i) {
      value_places_[i] = slab * kSlabBytes + slab_chunk(row_, 2 * piece + i);
    }
    for (int i = 0; i < 4; ++i) {
      key_places_[i] = slab * kSlabBytes + contraction_place<true>(row_, 4 * piece + i);
    }
  }

  __device__ void run(const PrefillItem& item) {
    PrefillPages pages(p_, item.sequence, item.begin, item.limit);
    RingPlace<2> next = raw_;
    for (const bool keys : {true, false}) {
      fetch(item, pages, item.begin, keys, next.slot);
      next.advance();
    }
    for (int tile = item.begin; tile < item.limit; tile += kTileKeys) {
      const int ahead = tile + kTileKeys;
      // Rows that are to be zeros: beyond the limit or on no page.
      uint32_t rows[2];
      for (int i = 0; i < 2; ++i) {
        const int position = tile + 32 * i + lane_;
        rows[i] = __ballot_sync(0xFFFFFFFFu, pages.page_of(position) >= 0 && position < item.limit);
      }
      if (ahead % kChunkKeys == 0) pages.enter(ahead);
      convert<true>(rows);
      if (ahead < item.limit) fetch(item, pages, ahead, true, raw_.slot);
      raw_.advance();
      convert<false>(rows);
      if (ahead < item.limit) fetch(item, pages, ahead, false, raw_.slot);
      raw_.advance();
    }
  }

 private:
  __device__ uint32_t raw(int slot) const {
    return ring_.shared + Layout::kRaw + slot * Layout::kRawBytes;
  }
  __device__ uint32_t raw_full(int slot) const {
    return ring_.shared + Layout::kRawFull + 8 * slot;
  }

  // Starts the copy of a tile: a lane of the first warp for each page.
  __device__ void fetch(const PrefillItem& item, const PrefillPages& pages, int tile, bool keys,
                        int slot) const {
    if (warp_ != 0) return;
    const int rows = min(kTileKeys, 1 << p_.keys.page_shift), first = lane_ * rows;
    const int position = tile + first;
    const int page = pages.page_of(first < kTileKeys ? position : tile);
    const bool inside = first < kTileKeys && page >= 0 && position < item.limit;
    const unsigned lanes = __ballot_sync(0xFFFFFFFFu, inside);
    if (lane_ == 0) {
      barrier_expect(raw_full(slot), __popc(lanes) * rows * (kWidth + 4));
    }
    __syncwarp();
    if (!inside) return;
    const int row = (item.head << p_.keys.page_shift) + pages.offset_of(position);
    const char* codes = keys ? p_.keys.k : p_.keys.v;
    const float* scales = keys ? p_.keys.k_scales : p_.keys.v_scales;
    bulk_copy(raw(slot) + first * kWidth, codes + page * p_.keys.page_stride + row * kWidth,
              rows * kWidth, raw_full(slot));
    bulk_copy(raw(slot) + Layout::kRawScales + first * 4,
              scales + page * p_.keys.scale_page_stride + row, rows * 4, raw_full(slot));
  }

  __device__ static void half4_of_e4m3(uint32_t codes, uint32_t (&to)[2]) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
        "cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(to[0]), "=r"(to[1])
        : "r"(codes));
  }
  template <bool kKeys>
  __device__ void convert(const uint32_t (&rows)[2]) {
    barrier_wait(raw_full(raw_.slot), raw_.parity);
    barrier_wait(ring_.empty(), ring_.place.parity ^ 1);
    const bool whole = (rows[0] & rows[1]) == 0xFFFFFFFFu;
    const uint32_t from = raw(raw_.slot) + row_ * kWidth + column_;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t to = ring_.slot() + i * (kPassRows * 128);
      uint32_t w[4];
      load_shared(from + i * (kPassRows * kWidth), w);
      if (!whole && (rows[i * kPassRows / 32] >> (i * kPassRows + row_) % 32 & 1) == 0) {
        w[0] = w[1] = w[2] = w[3] = 0;
      }
      uint32_t halves[4][2];
#pragma unroll
      for (int g = 0; g < 4; ++g) half4_of_e4m3(w[g], halves[g]);
      if constexpr (kKeys) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          store_shared(to + key_places_[g], halves[g][0], halves[g][1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          store_shared(to + value_places_[i], halves[2 * i][0], halves[2 * i][1],
                       halves[2 * i + 1][0], halves[2 * i + 1][1]);
        }
      }
    }
    if (warp_ < 2) {
      const uint32_t scale =
          load_shared(raw(raw_.slot) + Layout::kRawScales + (warp_ * 32 + lane_) * 4);
      store_shared(
          ring_.shared + Layout::kScales + (ring_.place.slot * kTileKeys + warp_ * 32 + lane_) * 4,
          (rows[warp_] >> lane_ & 1) != 0 ? scale : 0);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) barrier_arrive(ring_.full());
    ring_.place.advance();
    warpgroup_sync(1 + kConsumers);  // all have read the raw tile
  }
};

}  // namespace octet::cuda
