// Copies by the tensor memory accelerator (compute capability 9.0 and up) and the barriers in
// shared memory that say when they have landed.
#pragma once

#include <cstdint>
#include <cuda.h>

// Elsewhere the functions are there and do nothing: kernels that use them are not launched.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OCTET_HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define OCTET_HOPPER_ASM(...)
#endif

namespace octet::cuda {

__device__ inline void barrier_init([[maybe_unused]] uint32_t barrier,
                                    [[maybe_unused]] int arrivals) {
  OCTET_HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                   : "memory");
}
// What barrier_init wrote becomes visible to the copies.
__device__ inline void barrier_fence_init() {
  OCTET_HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and lets the phase wait for `bytes` of copies.
__device__ inline void barrier_expect([[maybe_unused]] uint32_t barrier,
                                      [[maybe_unused]] uint32_t bytes) {
  OCTET_HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(bytes)
                   : "memory");
}
__device__ inline void barrier_wait([[maybe_unused]] uint32_t barrier,
                                    [[maybe_unused]] uint32_t parity) {
  OCTET_HOPPER_ASM(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A box of a tensor of two dimensions, from (column, row) on.
__device__ inline void bulk_copy_box([[maybe_unused]] uint32_t to,
                                     [[maybe_unused]] const CUtensorMap* map,
                                     [[maybe_unused]] int column, [[maybe_unused]] int row,
                                     [[maybe_unused]] uint32_t barrier) {
  OCTET_HOPPER_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Neighbouring bytes; both addresses and the count are multiples of 16.
__device__ inline void bulk_copy([[maybe_unused]] uint32_t to, [[maybe_unused]] const void* from,
                                 [[maybe_unused]] uint32_t bytes,
                                 [[maybe_unused]] uint32_t barrier) {
  OCTET_HOPPER_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace octet::cuda

#undef OCTET_HOPPER_ASM
