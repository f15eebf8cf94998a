// Blocks of one cluster (PTX ISA, barrier.cluster and mapa): what one row needs of its neighbours.
// Before compute capability 9.0 every block is alone.
#pragma once

#include <cstdint>

#include "backend/cuda/device/reduce.cuh"

namespace octet::cuda {

#if __CUDA_ARCH__ >= 900

__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The largest of the blocks' values; each block passes one value, its threads all the same. Before
// the next call, and before the kernel ends, cluster_leave must follow.
__device__ inline uint32_t cluster_largest(uint32_t value) {
  const uint32_t size = cluster_size();
  if (size == 1) return value;
  __shared__ uint32_t own;
  if (threadIdx.x == 0) own = value;
  cluster_arrive();
  cluster_wait();
  const uint32_t lane = threadIdx.x % 32;
  if (lane < size) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&own));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(lane));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  }
  value = __reduce_max_sync(kAllLanes, value);
  cluster_arrive();  // has read
  return value;
}

// The float in the place of `own`, in shared memory, of the cluster's block `rank`.
__device__ inline float load_of_rank(const float* own, int rank) {
  float value;
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// Waits until no block reads this one's value any more.
__device__ inline void cluster_leave() {
  if (cluster_size() > 1) cluster_wait();
}

#else

__device__ inline void cluster_arrive() { __syncthreads(); }
__device__ inline void cluster_wait() {}
__device__ inline float load_of_rank(const float* own, int) { return *own; }
__device__ inline uint32_t cluster_largest(uint32_t value) { return value; }
__device__ inline void cluster_leave() {}

#endif

}  // namespace octet::cuda
