// The producer of a block of the prefill kernel: a warpgroup that brings keys and values of the
// tiles, in turn, from their pages into the ring, as 16-bit operands.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

template <bool kFp8, int kWidth, int kConsumers>
class PrefillProducer {
  using Layout = PrefillLayout<kFp8, kWidth, kConsumers>;
  using Place = RingPlace<Layout::kSlots>;
  static constexpr int kRowBytes = kWidth * (kFp8 ? 1 : 2);
  // In a pass each thread takes 16 bytes of a row.
  static constexpr int kPasses = kTileKeys * kRowBytes / (128 * 16);
  static constexpr int kPassRows = kTileKeys / kPasses;
  static constexpr int kPassBytes = kPassRows * 128;  // of a slab

  // A thread's part of a tile of codes, on its way.
  struct Codes {
    uint4 words[kPasses];
    float scale;
  };

  const AttentionProblem& p_;
  uint32_t shared_;
  int warp_, lane_;
  Place place_;
  uint32_t pending_ = 0;  // the full barrier of the slot being copied to
  // Where a thread reads and writes in a tile's first pass: eight bytes of keys each, 16 of values.
  int row_, column_;  // bytes
  int key_places_[kFp8 ? 4 : 2], value_places_[kFp8 ? 2 : 1];

  // Of the item.
  const int32_t* pages_ = nullptr;
  const char* keys_ = nullptr;  // of its head in page 0, from column_ on
  const char* values_ = nullptr;
  int head_ = 0, limit_ = 0;
  int page_ = -1, next_page_ = -1, first_page_ = 0;  // a lane knows one page of the chunk

 public:
  __device__ PrefillProducer(const AttentionProblem& p, uint32_t shared)
      : p_(p), shared_(shared), warp_(threadIdx.x % 128 / 32), lane_(threadIdx.x % 32) {
    int slab, piece;  // of 16 bytes of the slab's row
    if constexpr (kFp8) {
      // Eight rows, four lanes each, so ordered that the stores of 8 and of 16 lanes find different
      // banks.
      const int row = lane_ / 4;
      row_ = warp_ / Layout::kSlabs * 8 + row % 4 * 2 + ((row & 1) ^ (row >> 2));
      slab = warp_ % Layout::kSlabs;
      piece = lane_ % 4;
      column_ = slab * 64 + piece * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        value_places_[i] = slab * kSlabBytes + slab_chunk(row_, 2 * piece + i);
      }
    } else {
      constexpr int kPieces = kRowBytes / 16;
      const int thread = warp_ * 32 + lane_;
      row_ = thread / kPieces;
      slab = thread % kPieces / 8;
      piece = thread % 8;
      column_ = thread % kPieces * 16;
      value_places_[0] = slab * kSlabBytes + slab_chunk(row_, piece);
    }
    constexpr int kGroups = kFp8 ? 4 : 2;  // of four columns
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      key_places_[i] = slab * kSlabBytes + contraction_place<kFp8>(row_, piece * kGroups + i);
    }
  }

  __device__ void run(const PrefillItem<Layout>& item) {
    pages_ = p_.keys.pages + item.sequence * p_.table_stride;
    head_ = item.head;
    limit_ = item.limit;
    const int64_t from = (int64_t{head_} << p_.keys.page_shift) * kRowBytes + column_;
    keys_ = p_.keys.k + from;
    values_ = p_.keys.v + from;
    next_page_ = page_at(item.begin >> p_.keys.page_shift);
    enter(item.begin);
    if constexpr (kFp8) {
      Codes keys = load<true>(item.begin);
      for (int tile = item.begin; tile < limit_; tile += kTileKeys) {
        const Codes values = load<false>(tile);
        store<true>(keys);
        const int next = tile + kTileKeys;
        if (next % kChunkKeys == 0) enter(next);
        if (next < limit_) keys = load<true>(next);
        store<false>(values);
      }
    } else {
      for (int tile = item.begin; tile < limit_; tile += kTileKeys) {
        if (tile % kChunkKeys == 0 && tile != item.begin) enter(tile);
        copy<true>(tile);
        copy<false>(tile);
      }
    }
  }
  __device__ void finish() {
    if (pending_ != 0) publish_pending<0>();
  }

 private:
  __device__ int page_at(int first) const {
    const int index = first + lane_;
    if (index >= p_.keys.max_pages || index << p_.keys.page_shift >= limit_) return -1;
    const int page = pages_[index];
    return page < p_.keys.num_pages ? page : -1;
  }
  // A chunk has at most 32 pages, of eight tokens or more; `begin` is its first key to be read.
  __device__ void enter(int begin) {
    first_page_ = begin >> p_.keys.page_shift;
    page_ = next_page_;
    next_page_ = page_at((begin / kChunkKeys + 1) * kChunkKeys >> p_.keys.page_shift);
  }
  // Where a position's row lies: row `offset` of its page; with `inside` false nowhere.
  struct Row {
    uint32_t page;
    int offset;
    bool inside;
  };
  __device__ Row row_of(int position) const {
    const int page =
        __shfl_sync(0xFFFFFFFFu, page_, (position >> p_.keys.page_shift) - first_page_);
    return {static_cast<uint32_t>(page), position & ((1 << p_.keys.page_shift) - 1),
            page >= 0 && position < limit_};
  }
  // From a head's first row of page 0.
  __device__ int64_t bytes_to(const Row& row) const {
    const auto page_bytes = static_cast<uint32_t>(p_.keys.page_stride * (kFp8 ? 1 : 2));
    return static_cast<int64_t>(uint64_t{row.page} * page_bytes + row.offset * kRowBytes);
  }

  __device__ uint32_t slot() const {
    return shared_ + Layout::kRing + place_.slot * Layout::kTileBytes;
  }
  __device__ uint32_t full() const { return shared_ + Layout::kFull + 8 * place_.slot; }
  __device__ uint32_t empty() const { return shared_ + Layout::kEmpty + 8 * place_.slot; }
  __device__ void publish(uint32_t barrier) const {
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // Nothing waits for what is loaded before it is used.
  __device__ static void load_or_zero(const void* from, bool inside, uint4& to) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
        "mov.b32 %3, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
        : "l"(from), "r"(inside ? 1 : 0));
  }
  __device__ static void load_or_zero(const void* from, bool inside, float& to) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.f32 %0, [%1]; }"
        : "=&f"(to)
        : "l"(from), "r"(inside ? 1 : 0));
  }
  template <bool kKeys>
  __device__ Codes load(int tile) const {
    Codes result;
    const char* data = kKeys ? keys_ : values_;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const Row row = row_of(tile + i * kPassRows + row_);
      load_or_zero(data + bytes_to(row), row.inside, result.words[i]);
    }
    if (warp_ < kTileKeys / 32) {
      const Row row = row_of(tile + warp_ * 32 + lane_);
      const float* scales = kKeys ? p_.keys.k_scales : p_.keys.v_scales;
      load_or_zero(scales + (row.page * p_.keys.scale_page_stride +
                             (head_ << p_.keys.page_shift) + row.offset),
                   row.inside, result.scale);
    }
    return result;
  }
  template <bool kKeys>
  __device__ void store(const Codes& codes) {
    barrier_wait(empty(), place_.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t to = slot() + i * kPassBytes;
      const uint32_t w[4] = {codes.words[i].x, codes.words[i].y, codes.words[i].z,
                             codes.words[i].w};
#pragma unroll
      for (int g = 0; g < 4; g += kKeys ? 1 : 2) {
        const uint32_t a = half2_of_e4m3(w[g]), b = half2_of_e4m3(w[g] >> 16);
        if constexpr (kKeys) {
          store_shared(to + key_places_[g], a, b);
        } else {
          store_shared(to + value_places_[g / 2], a, b, half2_of_e4m3(w[g + 1]),
                       half2_of_e4m3(w[g + 1] >> 16));
        }
      }
    }
    if (warp_ < kTileKeys / 32) {
      store_shared(
          shared_ + Layout::kScales + (place_.slot * kTileKeys + warp_ * 32 + lane_) * 4,
          __float_as_uint(codes.scale));
    }
    publish(full());
    place_.advance();
  }

  // BF16 needs no arithmetic: copies run until the next slot's are on their way, or must wait.
  template <bool kKeys>
  __device__ void copy(int tile) {
    if (pending_ != 0 && !barrier_test(empty(), place_.parity ^ 1)) publish_pending<0>();
    barrier_wait(empty(), place_.parity ^ 1);
    const char* data = kKeys ? keys_ : values_;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const Row row = row_of(tile + i * kPassRows + row_);
      const char* from = row.inside ? data + bytes_to(row) : data;
      const uint32_t to = slot() + i * kPassBytes;
      if constexpr (kKeys) {
        copy_async_8(to + key_places_[0], from, row.inside);
        copy_async_8(to + key_places_[1], from + 8, row.inside);
      } else {
        copy_async_16(to + value_places_[0], from, row.inside);
      }
    }
    copy_async_commit();
    if (pending_ != 0) publish_pending<1>();
    pending_ = full();
    place_.advance();
  }
  template <int kYounger>
  __device__ void publish_pending() {
    copy_async_wait<kYounger>();
    publish(pending_);
    pending_ = 0;
  }
};

}  // namespace octet::cuda
