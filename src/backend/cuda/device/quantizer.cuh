// Encoding one value, and counting how codes were used: in registers, then once per block in the
// device's counters.
#pragma once

#include "backend/cuda/context.h"
#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/values.cuh"

namespace octet::cuda {

struct CodeCounts {
  unsigned elements = 0, saturated = 0, underflowed = 0, not_a_number = 0;

  template <bool kE5M2>
  __device__ uint8_t encode(float value, float scale) {
    // A division makes every NaN positive.
    const uint8_t code = encode_fp8<kE5M2>(isnan(value) ? value : __fdiv_rn(value, scale));
    const unsigned magnitude = code & 0x7Fu;
    ++elements;
    saturated += magnitude == (kE5M2 ? 0x7Bu : 0x7Eu) ? 1u : 0u;
    underflowed += magnitude == 0 && value != 0.0f ? 1u : 0u;
    not_a_number += magnitude == 0x7Fu ? 1u : 0u;
    return code;
  }

  // All threads of the block must call this.
  __device__ void add_to(DeviceCounters* counters) const {
    __shared__ unsigned totals[4];
    const unsigned index = threadIdx.x + threadIdx.y * blockDim.x;
    if (index < 4) totals[index] = 0;
    __syncthreads();
    const unsigned counts[4] = {elements, saturated, underflowed, not_a_number};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned sum = __reduce_add_sync(kAllLanes, counts[i]);
      if (index % 32 == 0 && sum > 0) atomicAdd(&totals[i], sum);
    }
    __syncthreads();
    if (index < 4 && totals[index] > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(counters) + index,
                static_cast<unsigned long long>(totals[index]));
    }
  }
};

}  // namespace octet::cuda
