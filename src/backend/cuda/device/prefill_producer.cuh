// The producer of a block of the prefill kernel: a warpgroup that brings keys and values of the
// tiles, in turn, from their pages into the ring, as 16-bit operands.
#pragma once

#include "backend/cuda/device/prefill_layout.cuh"

namespace octet::cuda {

template <bool kFp8, int kWidth, int kConsumers>
class PrefillProducer {
  using Layout = PrefillLayout<kFp8, kWidth, kConsumers>;
  static constexpr int kPasses = Layout::kSlabs * 2;  // of 32 rows of 64 codes by the warpgroup

  // One thread's part of a tile of codes, on its way.
  struct Codes {
    uint4 words[kPasses];
    float scale;
  };

  const AttentionProblem& p_;
  uint32_t shared_;
  int warp_, lane_;
  RingPlace<Layout::kSlots> place_;
  uint32_t pending_ = 0;  // the full barrier of the slot being copied to

  // Of the item.
  const int32_t* pages_ = nullptr;
  int head_ = 0, limit_ = 0;
  int page_ = -1, next_page_ = -1, first_page_ = 0;  // a lane knows one page of the chunk

 public:
  __device__ PrefillProducer(const AttentionProblem& p, uint32_t shared)
      : p_(p), shared_(shared), warp_(threadIdx.x % 128 / 32), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem<Layout>& item) {
    pages_ = p_.keys.pages + item.sequence * p_.table_stride;
    head_ = item.head;
    limit_ = item.limit;
    next_page_ = page_at(item.begin >> p_.keys.page_shift);
    enter(item.begin);
    if constexpr (kFp8) {
      Codes keys = load<true>(item.begin), values;
      for (int tile = item.begin; tile < limit_; tile += kTileKeys) {
        values = load<false>(tile);
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
  // The row (in all pages' order of tokens, of this head) of a position; −1: there is none.
  struct Row {
    int64_t page;
    int offset;
    bool inside;
  };
  __device__ Row row_of(int position) const {
    const int page =
        __shfl_sync(0xFFFFFFFFu, page_, (position >> p_.keys.page_shift) - first_page_);
    const int mask = (1 << p_.keys.page_shift) - 1;
    return {page, (position & mask) * p_.keys.heads + head_, page >= 0 && position < limit_};
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

  template <bool kKeys>
  __device__ Codes load(int tile) const {
    Codes result;
    const char* data = kKeys ? p_.keys.k : p_.keys.v;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const Row row = row_of(tile + code_row<kKeys>(i));
      const char* from = data + row.page * p_.keys.page_stride + row.offset * kWidth +
                         code_slab(i) * 64 + lane_ % 4 * 16;
      result.words[i] = row.inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
    if (warp_ < kTileKeys / 32) {
      const Row row = row_of(tile + warp_ * 32 + lane_);
      const float* scales = kKeys ? p_.keys.k_scales : p_.keys.v_scales;
      result.scale = row.inside ? scales[row.page * p_.keys.scale_page_stride + row.offset] : 0.0f;
    }
    return result;
  }
  // A pass of a warp takes eight rows of a slab, four lanes to a row; the order of rows keeps the
  // stores of eight or sixteen lanes on different banks.
  template <bool kKeys>
  __device__ int code_row(int pass) const {
    const int row = lane_ / 4;
    return (pass * 4 + warp_) / Layout::kSlabs * 8 + (kKeys ? row % 4 * 2 + row / 4 : row);
  }
  __device__ int code_slab(int pass) const { return (pass * 4 + warp_) % Layout::kSlabs; }

  template <bool kKeys>
  __device__ void store(const Codes& codes) {
    barrier_wait(empty(), place_.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint32_t slab = slot() + code_slab(i) * kSlabBytes;
      const int row = code_row<kKeys>(i), piece = lane_ % 4;
      const uint32_t w[4] = {codes.words[i].x, codes.words[i].y, codes.words[i].z,
                             codes.words[i].w};
      if constexpr (kKeys) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          store_shared(slab + contraction_place<true>(row, 4 * piece + g), half2_of_e4m3(w[g]),
                       half2_of_e4m3(w[g] >> 16));
        }
      } else {
#pragma unroll
        for (int g = 0; g < 4; g += 2) {
          store_shared(slab + slab_chunk(row, 2 * piece + g / 2), half2_of_e4m3(w[g]),
                       half2_of_e4m3(w[g] >> 16), half2_of_e4m3(w[g + 1]),
                       half2_of_e4m3(w[g + 1] >> 16));
        }
      }
    }
    if (warp_ < kTileKeys / 32) {
      store_shared(shared_ + Layout::kScales +
                       (place_.slot * kTileKeys + warp_ * 32 + lane_) * 4,
                   __float_as_uint(codes.scale));
    }
    publish(full());
    place_.advance();
  }

  // BF16 needs no arithmetic: copies run until the next slot's are on their way.
  template <bool kKeys>
  __device__ void copy(int tile) {
    if (pending_ != 0 && !barrier_test(empty(), place_.parity ^ 1)) publish_pending<0>();
    barrier_wait(empty(), place_.parity ^ 1);
    const char* data = kKeys ? p_.keys.k : p_.keys.v;
    constexpr int kPiece = kKeys ? 8 : 16;             // bytes
    constexpr int kPerRow = kWidth * 2 / kPiece;
#pragma unroll 4
    for (int i = 0; i < kTileKeys * kPerRow / 128; ++i) {
      const int index = i * 128 + warp_ * 32 + lane_;
      const int key = index / kPerRow, piece = index % kPerRow, in_slab = piece % (128 / kPiece);
      const Row row = row_of(tile + key);
      const char* from =
          row.inside ? data + (row.page * p_.keys.page_stride + row.offset * kWidth) * 2 +
                           piece * kPiece
                     : data;
      const uint32_t slab = slot() + piece / (128 / kPiece) * kSlabBytes;
      if constexpr (kKeys) {
        copy_async_8(slab + contraction_place<false>(key, in_slab), from, row.inside);
      } else {
        copy_async_16(slab + slab_chunk(key, in_slab), from, row.inside);
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
