// The prefill kernel over E4M3 pages, in the class of attention_codes.cuh: what its blocks hold,
// and the two warps that bring keys and values.
//
// A stage holds a chunk: keys, [256][kWidth] in rows swizzled by kWidth bytes, and values as they
// lie in their pages, blocks of [kWidth][16]. One warp asks for the copies; another one readies the
// values: what nobody wrote is cleared, the scales are brought under the chunk's power. Queries are
// [64][2 kWidth], the high terms of a row beside its low ones, in slabs of 128 columns swizzled by
// 128.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_layout.cuh"
#include "ops/attention.h"

namespace octet::cuda {

template <int kHeadWidth, bool kHasWindow>
struct CodesLayout {
  static constexpr int kWidth = kHeadWidth;
  static constexpr bool kWindowed = kHasWindow;  // without a window a chunk's code is shorter
  static constexpr int kConsumers = 2;           // warpgroups of a block; a third one produces
  static constexpr int kRows = 64 * kConsumers;  // query rows of an item: tokens × heads of a group
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of a thread; 168 at the start of three warpgroups.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kStages = 2;
  static constexpr int kItemSlots = 8;
  static constexpr int kTileBytes = kTileKeys * kWidth;
  static constexpr int kChunkBytes = kChunkKeys * kWidth;
  static constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);
  static constexpr int kBlocks = kChunkKeys / kBlockKeys;  // of a chunk
  static constexpr int kBlockBytes = kBlockKeys * kWidth;
  static constexpr int kScaleBytes = kChunkKeys * 4;

  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kStages * kChunkBytes;
  static constexpr int kQueries = kValues + kStages * kChunkBytes;
  static constexpr int kFetched = kQueries + kRows * 2 * kWidth;  // queries as they lie
  static constexpr int kFetchedStride = 16 * 2 * kWidth;          // between warps
  // Floats: scales of keys, of values, those of values × 2^−power; 2^power; where a row does not
  // see all of the chunk, the largest one of the values up to each key and that of each tile.
  // Integers: the blocks that are on a page, a bit each; whether a value's scale might make a
  // weight of zero NaN.
  static constexpr int kKeyScales = kFetched + kRows * 2 * kWidth;
  static constexpr int kValueScales = kKeyScales + kStages * kScaleBytes;
  static constexpr int kReadyScales = kValueScales + kStages * kScaleBytes;
  static constexpr int kTops = kReadyScales + kStages * kScaleBytes;
  static constexpr int kPower = kTops + kStages * kScaleBytes;
  static constexpr int kTileTops = kPower + kStages * 4;
  static constexpr int kOnPage = kTileTops + kStages * 4 * (kChunkKeys / kTileKeys);
  static constexpr int kOddScales = kOnPage + kStages * 4;
  static constexpr int kItems = kOddScales + kStages * 4;
  // Barriers of a stage: keys and values have come, values are ready, it may be overwritten.
  static constexpr int kKeysHere = kItems + kItemSlots * 32;
  static constexpr int kKeysEmpty = kKeysHere + kStages * 8;
  static constexpr int kValuesHere = kKeysEmpty + kStages * 8;
  static constexpr int kValuesReady = kValuesHere + kStages * 8;
  static constexpr int kValuesEmpty = kValuesReady + kStages * 8;
  static constexpr int kItemFull = kValuesEmpty + kStages * 8;
  static constexpr int kBytes = kItemFull + kItemSlots * 8;
  static_assert(kBytes <= 227 * 1024);
};

// By one warp.
template <class Layout>
class CodesCopier {
  const PrefillProblem& p_;
  const CUtensorMap* key_map_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kStages> place_;

 public:
  __device__ CodesCopier(const PrefillProblem& p, const CUtensorMap* key_map, uint32_t base)
      : p_(p), key_map_(key_map), base_(base), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem& item) {
    PrefillPages pages(p_, item.sequence, item.begin, item.limit);
    for (int chunk = item.begin / kChunkKeys * kChunkKeys; chunk < item.limit;
         chunk += kChunkKeys) {
      if (chunk > item.begin) pages.enter(chunk);
      // A lane takes the codes or the scales of a block.
      const int position = chunk + lane_ % Layout::kBlocks * Layout::kBlockKeys;
      const int page = pages.page_of(max(position, item.begin));
      const bool inside = page >= 0 && position >= item.begin && position < item.limit;
      const unsigned on_page = __ballot_sync(0xFFFFFFFFu, inside) & ((1u << Layout::kBlocks) - 1);
      const int row =
          ((page * p_.keys.heads + item.head) << p_.keys.page_shift) + pages.offset_of(position);
      copy<true>(inside, on_page, row);
      copy<false>(inside, on_page, row);
      place_.advance();
    }
  }

 private:
  template <bool kKeys>
  __device__ void copy(bool inside, unsigned on_page, int row) const {
    const uint32_t here = base_ + (kKeys ? Layout::kKeysHere : Layout::kValuesHere);
    const uint32_t empty = base_ + (kKeys ? Layout::kKeysEmpty : Layout::kValuesEmpty);
    const uint32_t barrier = here + 8 * place_.slot;
    const int block = lane_ % Layout::kBlocks;
    barrier_wait(empty + 8 * place_.slot, place_.parity ^ 1);
    if (lane_ == 0) {
      if (!kKeys) store_shared(base_ + Layout::kOnPage + 4 * place_.slot, on_page);
      barrier_expect(barrier, __popc(on_page) * (Layout::kBlockBytes + Layout::kBlockKeys * 4));
    }
    __syncwarp();
    if (!inside) return;
    if (lane_ < Layout::kBlocks) {
      const uint32_t to = base_ + (kKeys ? Layout::kKeys : Layout::kValues) +
                          place_.slot * Layout::kChunkBytes + block * Layout::kBlockBytes;
      if (kKeys) {
        bulk_copy_box(to, key_map_, 0, row, barrier);
      } else {
        bulk_copy(to, p_.keys.v + int64_t{row} * Layout::kWidth, Layout::kBlockBytes, barrier);
      }
    } else {
      bulk_copy(base_ + (kKeys ? Layout::kKeyScales : Layout::kValueScales) +
                    place_.slot * Layout::kScaleBytes + block * Layout::kBlockKeys * 4,
                (kKeys ? p_.keys.k_scales : p_.keys.v_scales) + row, Layout::kBlockKeys * 4,
                barrier);
    }
  }
};

// By one warp.
template <class Layout>
class CodesReadier {
  const PrefillProblem& p_;
  char* shared_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kStages> place_;

 public:
  __device__ CodesReadier(const PrefillProblem& p, char* shared)
      : p_(p), shared_(shared), base_(shared_address(shared)), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem& item) {
    for (int chunk = item.begin / kChunkKeys * kChunkKeys; chunk < item.limit;
         chunk += kChunkKeys) {
      barrier_wait(base_ + Layout::kValuesHere + 8 * place_.slot, place_.parity);
      constexpr int kOfLane = kChunkKeys / 32;
      float scales[kOfLane], tops[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int key = 32 * i + lane_;
        scales[i] = floats(Layout::kValueScales)[key];
        tops[i] = chunk + key < item.limit ? fmaxf(0, scales[i]) : 0;
      }
      float largest = 0;
      if (is_cut(item, chunk)) {
        largest = scan(tops);
      } else {
#pragma unroll
        for (const float top : tops) largest = fmaxf(largest, top);
        largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest)));
      }
      const int power = value_power(largest);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        floats(Layout::kReadyScales)[32 * i + lane_] = scales[i] * power_of_two(-power);
      }
      bool odd = false;  // below 2^28 a scale stays finite under any power
#pragma unroll
      for (const float scale : scales) odd |= __float_as_uint(scale) >= __float_as_uint(0x1p28f);
      odd = __any_sync(0xFFFFFFFFu, odd);
      if (lane_ == 0) {
        reinterpret_cast<float*>(shared_ + Layout::kPower)[place_.slot] = power_of_two(power);
        reinterpret_cast<int*>(shared_ + Layout::kOddScales)[place_.slot] = odd;
      }
      clear_rest(max(0, item.begin - chunk) / Layout::kBlockKeys, item.limit - chunk);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(base_ + Layout::kValuesReady + 8 * place_.slot);
      place_.advance();
    }
  }

 private:
  __device__ float* floats(int offset) const {
    return reinterpret_cast<float*>(shared_ + offset + place_.slot * Layout::kScaleBytes);
  }
  // Whether one of the item's rows may not see all of the chunk.
  __device__ bool is_cut(const PrefillItem& item, int chunk) const {
    return chunk + kChunkKeys > item.position_of(p_, item.first_row) + 1 ||
           (p_.window != 0 && chunk < item.limit - p_.window);
  }
  // Leaves the largest one up to each key of the chunk, and that of each tile; gives that of all.
  // tops[i] is of key 32 i + lane.
  __device__ float scan(float (&tops)[kChunkKeys / 32]) const {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
      for (float& top : tops) {
        const float before = __shfl_up_sync(0xFFFFFFFFu, top, offset);
        if (lane_ >= offset) top = fmaxf(top, before);
      }
    }
    auto* tile_tops = reinterpret_cast<float*>(shared_ + Layout::kTileTops) +
                      place_.slot * (kChunkKeys / kTileKeys);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kChunkKeys / 32; ++i) {
      floats(Layout::kTops)[32 * i + lane_] = fmaxf(largest, tops[i]);
      tops[i] = __shfl_sync(0xFFFFFFFFu, tops[i], 31);
      largest = fmaxf(largest, tops[i]);
      if (i % 2 == 1 && lane_ == 0) tile_tops[i / 2] = fmaxf(tops[i - 1], tops[i]);
    }
    return largest;
  }
  // Values that nobody wrote must not meet a weight of zero: those from key `keys` of the chunk on,
  // and those on no page. What the stage held before stays in the blocks that are not copied, those
  // before block `first` and those past the last key.
  __device__ void clear_rest(int first, int keys) const {
    const unsigned on_page =
        reinterpret_cast<const unsigned*>(shared_ + Layout::kOnPage)[place_.slot];
    const int end = min(Layout::kBlocks, (keys + Layout::kBlockKeys - 1) / Layout::kBlockKeys);
    bool cleared = false;
    for (int block = first; block < end; ++block) {
      const int written = (on_page >> block & 1) != 0 ? keys - block * Layout::kBlockKeys : 0;
      if (written >= Layout::kBlockKeys) continue;
      uint32_t mask[4];
      first_tokens(written, mask);
      auto* elements =
          reinterpret_cast<uint4*>(shared_ + Layout::kValues + place_.slot * Layout::kChunkBytes +
                                   block * Layout::kBlockBytes);
#pragma unroll
      for (int i = lane_; i < Layout::kWidth; i += 32) {
        const uint4 codes = elements[i];
        elements[i] = {codes.x & mask[0], codes.y & mask[1], codes.z & mask[2], codes.w & mask[3]};
      }
      cleared = true;
    }
    if (cleared) fence_async_proxy();
  }
};

}  // namespace octet::cuda
