// Barriers in shared memory between the roles of a block: who waits knows by a parity which of two
// neighbouring phases has ended.
#pragma once

#include <cstdint>

namespace octet::cuda {

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and holds the phase open until `bytes` more have been copied.
__device__ inline void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Copies what lies at multiples of 16 bytes from device to shared memory; the barrier learns of it.
__device__ inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Arrives when this thread's copies of async_copy.cuh so far have ended.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity has ended.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
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
  __device__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

}  // namespace octet::cuda
