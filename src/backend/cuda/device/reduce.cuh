// Reductions over a warp and a block in one fixed order, so that their results depend on the data
// alone. Every thread of the block must take part and receives the result.
#pragma once

#include <cstdint>

namespace octet::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <class T, class Combine>
__device__ T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

template <class T, class Combine>
__device__ T block_reduce(T value, T neutral, Combine combine) {
  __shared__ T parts[32];
  value = warp_reduce(value, combine);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_warps = (blockDim.x + 31) / 32;
  __syncthreads();
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  return warp_reduce(lane < num_warps ? parts[lane] : neutral, combine);
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class T>
__device__ T block_sum(T value) {
  return block_reduce(value, T(0), Sum());
}
// NaN is passed over.
__device__ inline float block_max(float value) {
  return block_reduce(value, -__int_as_float(0x7F800000), Max());
}

}  // namespace octet::cuda
