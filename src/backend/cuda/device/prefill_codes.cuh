// The prefill kernel over E4M3 pages, in the class of attention_codes.cuh: what its blocks hold,
// and the two warps that bring keys and values.
//
// Tiles of 64 keys go through two rings: keys, [64][kWidth] in rows swizzled by kWidth bytes, and
// values as they lie in their pages, four blocks of [kWidth][16]; of a chunk first all keys, then
// all values. One warp asks for the copies; another one readies the values: what nobody wrote is
// cleared, the scales are brought under the chunk's power. Queries are [64][2 kWidth], the high
// terms of a row beside its low ones, in slabs of 128 columns swizzled by 128.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_layout.cuh"
#include "ops/attention.h"

namespace octet::cuda {

template <int kHeadWidth>
struct CodesLayout {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kConsumers = 2;           // warpgroups of a block; a third one produces
  static constexpr int kRows = 64 * kConsumers;  // query rows of an item: tokens × heads of a group
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of a thread; 168 at the start of three warpgroups.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kSlots = 8;  // of each ring: two chunks
  static constexpr int kItemSlots = 8;
  static constexpr int kTileBytes = kTileKeys * kWidth;
  static constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);
  static constexpr int kBlocks = kTileKeys / kBlockKeys;
  static constexpr int kBlockBytes = kBlockKeys * kWidth;

  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kSlots * kTileBytes;
  static constexpr int kQueries = kValues + kSlots * kTileBytes;
  static constexpr int kFetched = kQueries + kRows * 2 * kWidth;  // queries as they lie
  static constexpr int kFetchedStride = 16 * 2 * kWidth;          // between warps
  // Floats: scales of keys, of values, those of values × 2^−power, 2^power; and the blocks that are
  // on a page, a bit each.
  static constexpr int kKeyScales = kFetched + kRows * 2 * kWidth;
  static constexpr int kValueScales = kKeyScales + kSlots * kTileKeys * 4;
  static constexpr int kReadyScales = kValueScales + kSlots * kTileKeys * 4;
  static constexpr int kPower = kReadyScales + kSlots * kTileKeys * 4;
  static constexpr int kOnPage = kPower + kSlots * 4;
  static constexpr int kFactors = kOnPage + kSlots * 4;
  static constexpr int kItems = kFactors + kRows * 4;
  // Barriers of a slot: keys and values have come, values are ready, it may be overwritten.
  static constexpr int kKeysHere = kItems + kItemSlots * 32;
  static constexpr int kKeysEmpty = kKeysHere + kSlots * 8;
  static constexpr int kValuesHere = kKeysEmpty + kSlots * 8;
  static constexpr int kValuesReady = kValuesHere + kSlots * 8;
  static constexpr int kValuesEmpty = kValuesReady + kSlots * 8;
  static constexpr int kItemFull = kValuesEmpty + kSlots * 8;
  static constexpr int kBytes = kItemFull + kItemSlots * 8;
  static_assert(kBytes <= 227 * 1024);
};

// The tiles [first, end) of the chunk from key `begin` on.
struct ChunkTiles {
  int begin, first, end;

  // Those with keys in [from, limit).
  __device__ ChunkTiles(int begin, int from, int limit)
      : begin(begin),
        first(max(0, (from - begin) / kTileKeys)),
        end(min(kChunkKeys / kTileKeys, (limit - begin + kTileKeys - 1) / kTileKeys)) {}
  __device__ int count() const { return max(0, end - first); }
};

// By one warp.
template <class Layout>
class CodesCopier {
  const PrefillProblem& p_;
  const CUtensorMap* key_map_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kSlots> keys_, values_;

 public:
  __device__ CodesCopier(const PrefillProblem& p, const CUtensorMap* key_map, uint32_t base)
      : p_(p), key_map_(key_map), base_(base), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem& item) {
    PrefillPages pages(p_, item.sequence, item.begin, item.limit);
    for (int chunk = item.begin / kChunkKeys * kChunkKeys; chunk < item.limit;
         chunk += kChunkKeys) {
      if (chunk > item.begin) pages.enter(chunk);
      const ChunkTiles tiles(chunk, item.begin, item.limit);
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        copy<true>(item, pages, chunk + tile * kTileKeys);
      }
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        copy<false>(item, pages, chunk + tile * kTileKeys);
      }
    }
  }

 private:
  // A lane copies the codes or the scales of a block.
  template <bool kKeys>
  __device__ void copy(const PrefillItem& item, const PrefillPages& pages, int tile) {
    constexpr int kBlocks = Layout::kBlocks, kBlockKeys = Layout::kBlockKeys;
    auto& place = kKeys ? keys_ : values_;
    const int block = lane_ % kBlocks, position = tile + block * kBlockKeys;
    const int page = pages.page_of(position);
    const bool inside = page >= 0 && position < item.limit;
    const unsigned on_page = __ballot_sync(0xFFFFFFFFu, inside) & ((1u << kBlocks) - 1);
    const uint32_t here = base_ + (kKeys ? Layout::kKeysHere : Layout::kValuesHere);
    const uint32_t empty = base_ + (kKeys ? Layout::kKeysEmpty : Layout::kValuesEmpty);
    const uint32_t barrier = here + 8 * place.slot;
    barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
    if (lane_ == 0) {
      if (!kKeys) store_shared(base_ + Layout::kOnPage + 4 * place.slot, on_page);
      barrier_expect(barrier, __popc(on_page) * (Layout::kBlockBytes + kBlockKeys * 4));
    }
    __syncwarp();
    const int row =
        ((page * p_.keys.heads + item.head) << p_.keys.page_shift) + pages.offset_of(position);
    if (inside && lane_ < kBlocks) {
      const uint32_t to = base_ + (kKeys ? Layout::kKeys : Layout::kValues) +
                          place.slot * Layout::kTileBytes + block * Layout::kBlockBytes;
      if (kKeys) {
        bulk_copy_box(to, key_map_, 0, row, barrier);
      } else {
        bulk_copy(to, p_.keys.v + int64_t{row} * Layout::kWidth, Layout::kBlockBytes, barrier);
      }
    } else if (inside && lane_ < 2 * kBlocks) {
      bulk_copy(base_ + (kKeys ? Layout::kKeyScales : Layout::kValueScales) +
                    (place.slot * kTileKeys + block * kBlockKeys) * 4,
                (kKeys ? p_.keys.k_scales : p_.keys.v_scales) + row, kBlockKeys * 4, barrier);
    }
    place.advance();
  }
};

// By one warp.
template <class Layout>
class CodesReadier {
  char* shared_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kSlots> place_;

 public:
  __device__ explicit CodesReadier(char* shared)
      : shared_(shared), base_(shared_address(shared)), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem& item) {
    for (int chunk = item.begin / kChunkKeys * kChunkKeys; chunk < item.limit;
         chunk += kChunkKeys) {
      const ChunkTiles tiles(chunk, item.begin, item.limit);
      float largest = 0;
      auto place = place_;
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        barrier_wait(base_ + Layout::kValuesHere + 8 * place.slot, place.parity);
        const int keys = item.limit - chunk - tile * kTileKeys;
        const float2 scale = floats(Layout::kValueScales, place.slot)[lane_];
        if (2 * lane_ < keys) largest = fmaxf(largest, scale.x);
        if (2 * lane_ + 1 < keys) largest = fmaxf(largest, scale.y);
        clear_rest(place.slot, keys);
        place.advance();
      }
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
      }
      const int power = value_power(largest);
      const float down = power_of_two(-power);
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        const float2 scale = floats(Layout::kValueScales, place_.slot)[lane_];
        floats(Layout::kReadyScales, place_.slot)[lane_] = {scale.x * down, scale.y * down};
        if (lane_ == 0) {
          reinterpret_cast<float*>(shared_ + Layout::kPower)[place_.slot] = power_of_two(power);
        }
        __syncwarp();
        if (lane_ == 0) barrier_arrive(base_ + Layout::kValuesReady + 8 * place_.slot);
        place_.advance();
      }
    }
  }

 private:
  __device__ float2* floats(int offset, int slot) const {
    return reinterpret_cast<float2*>(shared_ + offset + slot * kTileKeys * 4);
  }
  // Values that nobody wrote must not meet a weight of zero: those from key `keys` of the tile on,
  // and those on no page.
  __device__ void clear_rest(int slot, int keys) const {
    const unsigned on_page = reinterpret_cast<const unsigned*>(shared_ + Layout::kOnPage)[slot];
    if (on_page == (1u << Layout::kBlocks) - 1 && keys >= kTileKeys) return;
    for (int block = 0; block < Layout::kBlocks; ++block) {
      const int written = (on_page >> block & 1) != 0 ? keys - block * Layout::kBlockKeys : 0;
      if (written >= Layout::kBlockKeys) continue;
      uint32_t mask[4] = {};  // of a head element's 16 tokens, in the order of their places
#pragma unroll
      for (int token = 0; token < Layout::kBlockKeys; ++token) {
        const int place = static_cast<int>(ops::value_place(token));
        if (token < written) mask[place / 4] |= 0xFFu << place % 4 * 8;
      }
      auto* elements = reinterpret_cast<uint4*>(
          shared_ + Layout::kValues + slot * Layout::kTileBytes + block * Layout::kBlockBytes);
#pragma unroll
      for (int i = lane_; i < Layout::kWidth; i += 32) {
        const uint4 codes = elements[i];
        elements[i] = {codes.x & mask[0], codes.y & mask[1], codes.z & mask[2], codes.w & mask[3]};
      }
    }
    fence_async_proxy();
  }
};

}  // namespace octet::cuda
