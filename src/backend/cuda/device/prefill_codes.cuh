// The prefill kernel over E4M3 pages, in the class of attention_codes.cuh: the roles of its blocks.
//
// A stage of the ring holds a tile's keys, [64][kWidth] in rows swizzled by kWidth bytes, its
// values as they lie in their pages, four blocks of [kWidth][16], and the scales of both. A warp
// asks for the copies; a second one readies the values: what nobody wrote is cleared, the scales
// are brought under the tile's power. Queries are [64][2 kWidth], the high terms of a row beside
// its low ones, in slabs of 128 columns swizzled by 128.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_rows.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"
#include "ops/attention.h"

namespace octet::cuda {

template <int kHeadWidth, int kNumConsumers, int kColumns, bool kIsAhead>
struct CodesLayout {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kConsumers = kNumConsumers;
  static constexpr int kSlabColumns = kColumns;  // head elements of a product with values
  static constexpr bool kAhead = kIsAhead;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of a thread; 65,536 for all at the start.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
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
  static constexpr int kFetched = kQueries + kRows * 2 * kWidth;
  static constexpr int kTotals = kFetched + kRows * 2 * kWidth;  // rows' results so far
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

template <class Layout>
class CodesConsumer : public PrefillRows<CodesConsumer<Layout>, Layout> {
  static constexpr int kWidth = Layout::kWidth;
  using Rows = PrefillRows<CodesConsumer, Layout>;
  using Rows::base_, Rows::lane_, Rows::shared_, Rows::factor_, Rows::old_weight_,
      Rows::new_weight_, Rows::sum_;

  RingPlace<Layout::kStages> place_;
  float scores_[32];           // of the tile, then its softmax weights
  uint32_t weights_[2][2][4];  // term, step
  float down_[2];              // rarely: values are to be multiplied by this first

 public:
  using Rows::Rows;

  __device__ void place_queries() {
    auto* factors = reinterpret_cast<float*>(shared_ + Layout::kFactors) + this->group_ * 64;
    copy_async_wait<0>();
    warpgroup_sync(1 + this->group_);  // the last item's are no longer used
#pragma unroll 2
    for (int i = 0; i < Rows::kQueryPasses; ++i) {
      uint32_t words[4];
      load_shared(this->fetched_query(i), words);
      place_query(this->query_row(i), words, factors);
    }
    fence_async_proxy();
    warpgroup_sync(1 + this->group_);
#pragma unroll
    for (int h = 0; h < 2; ++h) factor_[h] = factors[this->row_of(0, h)] * this->p_.factor;
  }

  // The scores of the first tile.
  __device__ void begin_tiles() {
    if constexpr (Layout::kAhead) {
      float low[32];
      start_keys(place_, scores_, low);
      end_keys(scores_, low);
    }
  }
  __device__ void take_tile(int tile, bool masked, bool is_last) {
    if constexpr (Layout::kAhead) {
      if (is_last) {
        weigh<true>(tile);
        add_values();
      } else {
        float high[32], low[32];
        auto next = place_;
        next.advance();
        start_keys(next, high, low);
        masked ? weigh<true>(tile) : weigh<false>(tile);
        end_keys(high, low);
#pragma unroll
        for (int i = 0; i < 32; ++i) scores_[i] = high[i];
        add_values();
      }
    } else {
      float low[32];
      start_keys(place_, scores_, low);
      end_keys(scores_, low);
      masked ? weigh<true>(tile) : weigh<false>(tile);
      add_values();
    }
    place_.advance();
  }
  __device__ void skip_tile() {
    barrier_wait(base_ + Layout::kValuesReady + 8 * place_.slot, place_.parity);
    release();
    place_.advance();
  }

 private:
  __device__ int stage() const { return Layout::kRing + place_.slot * Layout::kStageBytes; }
  __device__ const float* stage_floats(int offset) const {
    return reinterpret_cast<const float*>(shared_ + stage() + offset);
  }
  __device__ void release() const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(base_ + Layout::kEmpty + 8 * place_.slot);
  }

  // Eight elements of a row from each of its lanes.
  __device__ void place_query(int row, const uint32_t (&words)[4], float* factors) const {
    const int column = lane_ % Rows::kQueryLanes * 8;
    float q[8], amax = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      q[e] = __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u);
      amax = fmaxf(amax, fabsf(q[e]));
    }
#pragma unroll
    for (int offset = 1; offset < Rows::kQueryLanes; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    }
    const int power = query_power(amax);
    if (column == 0) factors[row] = power_of_two(-power);
    uint32_t terms[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* x = &q[4 * half];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= power_of_two(power);
      const TermPairs first = e4m3_terms(x[0], x[1]), second = e4m3_terms(x[2], x[3]);
      terms[0][half] = first.high | second.high << 16;
      terms[1][half] = first.low | second.low << 16;
    }
#pragma unroll
    for (int term = 0; term < 2; ++term) {
      const int at = term * kWidth + column;  // of the row's 2 kWidth bytes
      store_shared(
          this->query_tile() + at / 128 * kSlabBytes + slab_chunk(row, at % 128 / 16) + at % 16,
          terms[term][0], terms[term][1]);
    }
  }

  // The matrix descriptor of an operand from a shared-memory address on: rows of kSwizzle bytes,
  // swizzled so; or, with 0, core matrices of eight rows of 16 bytes, those of neighbouring rows
  // side by side. The sum is in units of 16 bytes, as far as it is known beforehand.
  template <int kSwizzle>
  __device__ static uint64_t descriptor(uint32_t address, int offset) {
    constexpr uint64_t kMode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : 0;
    constexpr uint64_t kStride = (kSwizzle == 0 ? 128 : 8 * kSwizzle) >> 4;
    constexpr uint32_t kLeading = kSwizzle == 0 ? Layout::kBlockBytes >> 4 : 1;
    return kMode << 62 | kStride << 32 | ((kLeading << 16) + (offset >> 4) + (address >> 4));
  }
  using Values = float[Layout::kSlabColumns / 2];

  // Products of the queries' terms and a tile's keys; `end_keys` adds them up.
  __device__ void start_keys(const RingPlace<Layout::kStages>& place, float (&high)[32],
                             float (&low)[32]) {
    barrier_wait(base_ + Layout::kKeysHere + 8 * place.slot, place.parity);
    const uint32_t keys = base_ + Layout::kRing + place.slot * Layout::kStageBytes;
    const auto multiply = [&](float(&products)[32], int term) {
#pragma unroll
      for (int step = 0; step < kWidth / 32; ++step) {
        const int at = term * kWidth + step * 32;
        Wgmma<64>::run<Operands::kE4M3>(
            products, descriptor<128>(this->query_tile(), at / 128 * kSlabBytes + at % 128),
            descriptor<kWidth>(keys, Layout::kKeys + step * 32), step > 0);
      }
    };
    wgmma_hold(high);
    wgmma_hold(low);
    wgmma_fence();
    multiply(high, 0);
    multiply(low, 1);
    wgmma_commit();
  }
  __device__ void end_keys(float (&high)[32], float (&low)[32]) {
    wgmma_wait<0>();
    wgmma_hold(high);
    wgmma_hold(low);
#pragma unroll
    for (int i = 0; i < 32; ++i) high[i] += low[i];
  }
  __device__ void start_values(int slab, Values (&products)[2]) {
    wgmma_hold(products[0]);
    wgmma_hold(products[1]);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = 2 * step * Layout::kBlockBytes + slab * (Layout::kSlabColumns * 16);
        wgmma_code_values(products[term], weights_[term][step],
                          descriptor<0>(base_ + stage(), Layout::kValues + at), step > 0);
      }
    }
    wgmma_commit();
  }
  // Releases the stage.
  __device__ void add_values() {
    constexpr int kSlabs = kWidth / Layout::kSlabColumns, kBuffers = Layout::kAhead ? 2 : 1;
    Values products[kBuffers][2];
    if (kBuffers == 2) start_values(0, products[0]);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      auto& [high, low] = products[slab % kBuffers];
      if (kBuffers == 1) start_values(slab, products[0]);
      if (kBuffers == 2 && slab + 1 < kSlabs) {
        start_values(slab + 1, products[(slab + 1) % kBuffers]);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_hold(high);
      wgmma_hold(low);
      if (slab == kSlabs - 1) release();
#pragma unroll
      for (int i = 0; i < Layout::kSlabColumns / 2; ++i) high[i] += low[i];
      if (down_[0] != 1 || down_[1] != 1) {
#pragma unroll
        for (int i = 0; i < Layout::kSlabColumns / 2; ++i) high[i] *= down_[i % 4 / 2];
      }
      this->fold_values(slab * (Layout::kSlabColumns / 2), high);
    }
  }

  // From scores to the terms of the weights; the chunk's maximum and sums move on. Waits for the
  // values.
  template <bool kMasked>
  __device__ void weigh(int tile) {
    const int t = lane_ % 4;
    const auto column = [](int i) { return i / 2 * 8 + i % 2; };  // of a row's i-th score
    [[maybe_unused]] unsigned seen[2];
    const auto score = [&](int h, int i) -> float& { return scores_[i / 2 * 4 + 2 * h + i % 2]; };
    {
      const float* scales = stage_floats(Layout::kKeyScales) + 2 * t;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) scores_[4 * j + e] *= e % 2 == 0 ? scale.x : scale.y;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kMasked) {
        seen[h] = this->seen(h, tile);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if ((seen[h] >> i & 1) == 0) score(h, i) = -INFINITY;
        }
      }
      float largest[4];  // side by side, lest each waits for the one before
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        largest[i % 4] = i < 4 ? score(h, i) : fmaxf(largest[i % 4], score(h, i));
      }
      const float maximum = factor_[h] * quad_max(fmaxf(fmaxf(largest[0], largest[1]),
                                                        fmaxf(largest[2], largest[3])));
      this->fold_maximum(h, maximum);
      const float shift = kMasked && maximum == -INFINITY ? 0.0f : -maximum;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        score(h, i) = exp2_flushing(fmaf(score(h, i), factor_[h], shift));
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto p = [&](int j) { return score(h, 2 * j + e); };
        const float sum = ((p(0) + p(1)) + (p(2) + p(3))) + ((p(4) + p(5)) + (p(6) + p(7)));
        sum_[h][e] = fmaf(sum_[h][e], old_weight_[h], sum * new_weight_[h]);
      }
    }
    barrier_wait(base_ + Layout::kValuesReady + 8 * place_.slot, place_.parity);
    const float* scales =
        stage_floats(kMasked ? Layout::kValueScales : Layout::kReadyScales) + 2 * t;
    if constexpr (kMasked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float own[16], largest = 0;  // scales, 0 for keys that the row does not see
        // From anew, which is sooner tested than 32 predicates are kept.
        seen[h] = __shfl_sync(0xFFFFFFFFu, seen[h], lane_);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j);
          own[2 * j] = (seen[h] >> 2 * j & 1) != 0 ? scale.x : 0.0f;
          own[2 * j + 1] = (seen[h] >> 2 * j & 2) != 0 ? scale.y : 0.0f;
          largest = fmaxf(largest, fmaxf(own[2 * j], own[2 * j + 1]));
        }
        const int power = value_power(quad_max(largest));
        const float up = power_of_two(-power);
#pragma unroll
        for (int i = 0; i < 16; ++i) score(h, i) *= own[i] * up;
        merge_power(h, power_of_two(power));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) scores_[4 * j + e] *= e % 2 == 0 ? scale.x : scale.y;
      }
      const float down = *stage_floats(Layout::kPower);
      merge_power(0, down);
      merge_power(1, down);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* a = &scores_[4 * (4 * step + 2 * (r / 2)) + 2 * (r % 2)];
        const TermPairs first = e4m3_terms(a[0], a[1]), second = e4m3_terms(a[4], a[5]);
        weights_[0][step][r] = first.high | second.high << 16;
        weights_[1][step][r] = first.low | second.low << 16;
      }
    }
  }
  // Both factors of the values are one where no product of theirs can be subnormal.
  __device__ void merge_power(int h, float down) {
    float& weight = this->new_weight_[h];
    const bool one = down >= 0x1p-60f && (weight >= 0x1p-60f || weight == 0);
    down_[h] = one ? 1.0f : down;
    if (one) weight *= down;
  }
};

}  // namespace octet::cuda
