// The producers of a block of the prefill kernel over BF16 pages: a warpgroup that brings keys and
// values of the tiles, in turn, from their pages into the ring. A thread takes 16 bytes of a row in
// each of several passes over a tile.
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

// Copies need no thread to end. A warp takes 16 rows, which lie side by side in a page.
template <int kWidth>
class PrefillCopier {
  using Layout = PrefillLayout<kWidth>;
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
      key_places_[i] = slab + contraction_place(row, piece % 8 * 2 + i);
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

}  // namespace octet::cuda
