// Between the roles of a block: arrivals at the barriers of bulk_copy.cuh, and rings of slots.
#pragma once

#include <cstdint>

namespace octet::cuda {

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when this thread's copies of async_copy.cuh so far have ended.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// A barrier of the 128 threads of one warpgroup; ids from 1 up (0 is the whole block's).
__device__ inline void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// A place in a ring of kSlots, and the parity of its turn.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void advance(int count = 1) {
    slot += count;
    if (slot >= kSlots) slot -= kSlots, parity ^= 1;
  }
};

}  // namespace octet::cuda
