// The prefill kernel over E4M3 pages, in the class of attention_codes.cuh: the roles of its blocks.
//
// A stage of the ring holds a tile's keys, [64][kWidth] in rows swizzled by kWidth bytes, its
// values as they lie in their pages, four blocks of [kWidth][16], and the scales of both. A warp
// asks for the copies; a second one readies the values: what nobody wrote is cleared, the scales
// are brought under the tile's power. Queries are [64][2 kWidth], the high terms of a row beside
// its low ones, in slabs of 128 columns swizzled by 128.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_layout.cuh"
#include "ops/attention.h"

namespace octet::cuda {

template <int kHeadWidth, bool kIsJoined, int kColumns>
struct CodesLayout {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kConsumers = 3;
  static constexpr bool kJoined = kIsJoined;
  static constexpr int kSlabColumns = kColumns;  // head elements of a product with values
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of a thread; 128 at the start of four warpgroups.
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kStages = 4;
  static constexpr int kItemSlots = 8;
  static constexpr int kTileBytes = kTileKeys * kWidth;
  static constexpr int kBlockKeys = static_cast<int>(ops::kValueBlock);
  static constexpr int kBlocks = kTileKeys / kBlockKeys;
  static constexpr int kBlockBytes = kBlockKeys * kWidth;

  // Of a stage. Floats: scales of keys, of values, those of values × 2^−power, 2^power; and the
  // blocks that are on a page, a bit each.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kTileBytes;
  static constexpr int kKeyScales = kValues + kTileBytes;
  static constexpr int kValueScales = kKeyScales + kTileKeys * 4;
  static constexpr int kReadyScales = kValueScales + kTileKeys * 4;
  static constexpr int kPower = kReadyScales + kTileKeys * 4;
  static constexpr int kOnPage = kPower + 4;
  static constexpr int kStageBytes = (kOnPage + 4 + 1023) / 1024 * 1024;

  static constexpr int kRing = 0;
  static constexpr int kQueries = kRing + kStages * kStageBytes;
  static constexpr int kTotals = kQueries + kRows * 2 * kWidth;  // rows' results so far
  static constexpr int kFactors = kTotals + kRows * kWidth * 4;
  static constexpr int kItems = kFactors + kRows * 4;
  // Barriers of a stage: keys and values have come, values are ready, the stage may be overwritten.
  static constexpr int kKeysHere = kItems + kItemSlots * 32;
  static constexpr int kValuesHere = kKeysHere + kStages * 8;
  static constexpr int kValuesReady = kValuesHere + kStages * 8;
  static constexpr int kEmpty = kValuesReady + kStages * 8;
  static constexpr int kItemFull = kEmpty + kStages * 8;
  static constexpr int kBytes = kItemFull + kItemSlots * 8;
  static_assert(kBytes <= 227 * 1024);
};

// By one warp.
template <class Layout>
class CodesCopier {
  const PrefillProblem& p_;
  const CUtensorMap* key_map_;
  char* shared_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kStages> place_;

 public:
  __device__ CodesCopier(const PrefillProblem& p, const CUtensorMap* key_map, char* shared)
      : p_(p),
        key_map_(key_map),
        shared_(shared),
        base_(shared_address(shared)),
        lane_(threadIdx.x % 32) {}

  // A lane copies one thing of one block.
  __device__ void run(const PrefillItem& item) {
    PrefillPages pages(p_, item.sequence, item.begin, item.limit);
    constexpr int kBlocks = Layout::kBlocks, kBlockKeys = Layout::kBlockKeys;
    const int block = lane_ % kBlocks, what = lane_ / kBlocks;
    for (int tile = item.begin; tile < item.limit; tile += kTileKeys) {
      if (tile % kChunkKeys == 0 && tile != item.begin) pages.enter(tile);
      const int position = tile + block * kBlockKeys, page = pages.page_of(position);
      const bool inside = page >= 0 && position < item.limit;
      const unsigned on_page = __ballot_sync(0xFFFFFFFFu, inside) & ((1u << kBlocks) - 1);
      const uint32_t stage = base_ + Layout::kRing + place_.slot * Layout::kStageBytes;
      const uint32_t keys_here = base_ + Layout::kKeysHere + 8 * place_.slot;
      const uint32_t values_here = base_ + Layout::kValuesHere + 8 * place_.slot;
      barrier_wait(base_ + Layout::kEmpty + 8 * place_.slot, place_.parity ^ 1);
      if (lane_ == 0) {
        const uint32_t bytes = __popc(on_page) * (Layout::kBlockBytes + kBlockKeys * 4);
        store_shared(stage + Layout::kOnPage, on_page);
        barrier_expect(keys_here, bytes);
        barrier_expect(values_here, bytes);
      }
      __syncwarp();
      if (inside) {
        const int row =
            ((page * p_.keys.heads + item.head) << p_.keys.page_shift) + pages.offset_of(position);
        if (what == 0) {
          bulk_copy_box(stage + Layout::kKeys + block * Layout::kBlockBytes, key_map_, 0, row,
                        keys_here);
        } else if (what == 1) {
          bulk_copy(stage + Layout::kValues + block * Layout::kBlockBytes,
                    p_.keys.v + int64_t{row} * Layout::kWidth, Layout::kBlockBytes, values_here);
        } else if (what == 2) {
          bulk_copy(stage + Layout::kKeyScales + block * kBlockKeys * 4, p_.keys.k_scales + row,
                    kBlockKeys * 4, keys_here);
        } else if (what == 3) {
          bulk_copy(stage + Layout::kValueScales + block * kBlockKeys * 4, p_.keys.v_scales + row,
                    kBlockKeys * 4, values_here);
        }
      }
      place_.advance();
    }
  }
};

// By one warp.
template <class Layout>
class CodesReadier {
  char* shared_;
  uint32_t base_;
  int lane_;
  RingPlace<Layout::kStages> place_;

 public:
  __device__ explicit CodesReadier(char* shared)
      : shared_(shared), base_(shared_address(shared)), lane_(threadIdx.x % 32) {}

  __device__ void run(const PrefillItem& item) {
    for (int tile = item.begin; tile < item.limit; tile += kTileKeys) {
      char* stage = shared_ + Layout::kRing + place_.slot * Layout::kStageBytes;
      barrier_wait(base_ + Layout::kValuesHere + 8 * place_.slot, place_.parity);
      const auto* scales = reinterpret_cast<const float*>(stage + Layout::kValueScales);
      auto* ready = reinterpret_cast<float*>(stage + Layout::kReadyScales);
      const float a = scales[lane_], b = scales[32 + lane_];
      float largest = 0;
      if (tile + lane_ < item.limit) largest = a;
      if (tile + 32 + lane_ < item.limit) largest = fmaxf(largest, b);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
      }
      const int power = value_power(largest);
      ready[lane_] = a * power_of_two(-power);
      ready[32 + lane_] = b * power_of_two(-power);
      if (lane_ == 0) *reinterpret_cast<float*>(stage + Layout::kPower) = power_of_two(power);
      clear_rest(stage, item.limit - tile);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(base_ + Layout::kValuesReady + 8 * place_.slot);
      place_.advance();
    }
  }

 private:
  // Values that nobody wrote must not meet a weight of zero: those from key `keys` of the tile on,
  // and those on no page.
  __device__ void clear_rest(char* stage, int keys) const {
    const unsigned on_page = *reinterpret_cast<const unsigned*>(stage + Layout::kOnPage);
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
      auto* elements =
          reinterpret_cast<uint4*>(stage + Layout::kValues + block * Layout::kBlockBytes);
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
