// A consumer of a block of the prefill kernel over E4M3 pages: the class of attention_codes.cuh by
// wgmma's FP8 products.
#pragma once

#include "backend/cuda/device/attention_codes.cuh"
#include "backend/cuda/device/prefill_codes.cuh"
#include "backend/cuda/device/prefill_rows.cuh"
#include "backend/cuda/device/wgmma_attention.cuh"

namespace octet::cuda {

template <class Layout>
class CodesConsumer : public PrefillRows<CodesConsumer<Layout>, Layout> {
  static constexpr int kWidth = Layout::kWidth;
  using Rows = PrefillRows<CodesConsumer, Layout>;
  using Rows::base_, Rows::lane_, Rows::shared_, Rows::factor_, Rows::old_weight_,
      Rows::new_weight_, Rows::sum_;

  RingPlace<Layout::kStages> place_;
  float scores_[32];           // of the tile, then its softmax weights
  uint32_t weights_[2][2][4];  // term, step

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

  __device__ void take_tile(int tile, bool masked) {
    multiply_keys();
    weigh(tile, masked);
#pragma unroll
    for (int slab = 0; slab < kWidth / Layout::kSlabColumns; ++slab) {
      float values[Layout::kSlabColumns / 2];
      multiply_values(slab, values);
      if (slab + 1 == kWidth / Layout::kSlabColumns) release();
      this->fold_values(slab * (Layout::kSlabColumns / 2), values);
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
  // Scores: the queries' terms by the tile's keys and their scales.
  __device__ void multiply_keys() {
    barrier_wait(base_ + Layout::kKeysHere + 8 * place_.slot, place_.parity);
    const auto multiply = [&](float(&products)[32], int term, bool add) {
#pragma unroll
      for (int step = 0; step < kWidth / 32; ++step) {
        const int at = term * kWidth + step * 32;
        Wgmma<64>::run<Operands::kE4M3>(
            products, descriptor<128>(this->query_tile(), at / 128 * kSlabBytes + at % 128),
            descriptor<kWidth>(base_ + stage(), Layout::kKeys + step * 32), add || step > 0);
      }
    };
    float2 scales[8];
    wgmma_hold(scores_);
    if constexpr (Layout::kJoined) {
      wgmma_fence();
      multiply(scores_, 1, false);
      multiply(scores_, 0, true);
      wgmma_commit();
      load_scales(Layout::kKeyScales, scales);
      wgmma_wait<0>();
      wgmma_hold(scores_);
    } else {
      float low[32];
      wgmma_hold(low);
      wgmma_fence();
      multiply(scores_, 0, false);
      multiply(low, 1, false);
      wgmma_commit();
      load_scales(Layout::kKeyScales, scales);
      wgmma_wait<0>();
      wgmma_hold(scores_);
      wgmma_hold(low);
#pragma unroll
      for (int i = 0; i < 32; ++i) scores_[i] += low[i];
    }
    scale_scores(scales);
  }
  // Those of the lane's columns.
  __device__ void load_scales(int offset, float2 (&scales)[8]) const {
    const float* from = stage_floats(offset) + 2 * (lane_ % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) scales[j] = *reinterpret_cast<const float2*>(from + 8 * j);
  }
  __device__ void scale_scores(const float2 (&scales)[8]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) scores_[i] *= i % 2 == 0 ? scales[i / 4].x : scales[i / 4].y;
  }
  // The weights' terms and the tile's values.
  __device__ void multiply_values(int slab, float (&values)[Layout::kSlabColumns / 2]) {
    const auto multiply = [&](float(&products)[Layout::kSlabColumns / 2], int term, bool add) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = 2 * step * Layout::kBlockBytes + slab * (Layout::kSlabColumns * 16);
        wgmma_code_values(products, weights_[term][step],
                          descriptor<0>(base_ + stage(), Layout::kValues + at), add || step > 0);
      }
    };
    wgmma_hold(values);
    if constexpr (Layout::kJoined) {
      wgmma_fence();
      multiply(values, 1, false);
      multiply(values, 0, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(values);
    } else {
      float low[Layout::kSlabColumns / 2];
      wgmma_hold(low);
      wgmma_fence();
      multiply(values, 0, false);
      multiply(low, 1, false);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(values);
      wgmma_hold(low);
#pragma unroll
      for (int i = 0; i < Layout::kSlabColumns / 2; ++i) values[i] += low[i];
    }
  }

  // From scores to the terms of the weights; the chunk's maximum and sums move on. Waits for the
  // values.
  __device__ void weigh(int tile, bool masked) {
    const auto score = [&](int h, int i) -> float& { return scores_[i / 2 * 4 + 2 * h + i % 2]; };
    unsigned seen[2];
    if (masked) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        seen[h] = this->seen(h, tile);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if ((seen[h] >> i & 1) == 0) score(h, i) = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest[4];  // side by side, lest each waits for the one before
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        largest[i % 4] = i < 4 ? score(h, i) : fmaxf(largest[i % 4], score(h, i));
      }
      const float maximum = factor_[h] * quad_max(fmaxf(fmaxf(largest[0], largest[1]),
                                                        fmaxf(largest[2], largest[3])));
      this->fold_maximum(h, maximum);
      const float shift = maximum == -INFINITY ? 0.0f : -maximum;
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
    float2 scales[8];
    if (masked) {
      load_scales(Layout::kValueScales, scales);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float own[16], largest = 0;  // scales, 0 for keys that the row does not see
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
          own[i] = (seen[h] >> i & 1) != 0 ? scale : 0.0f;
          largest = fmaxf(largest, own[i]);
        }
        const int power = value_power(quad_max(largest));
        const float up = power_of_two(-power);
#pragma unroll
        for (int i = 0; i < 16; ++i) score(h, i) *= own[i] * up;
        new_weight_[h] *= power_of_two(power);
      }
    } else {
      load_scales(Layout::kReadyScales, scales);
      scale_scores(scales);
      const float down = *stage_floats(Layout::kPower);
      new_weight_[0] *= down;
      new_weight_[1] *= down;
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
};

}  // namespace octet::cuda
