// The products of attention on a warpgroup's matrix unit: D [64, 64] (+)= A [64, 16] B. Operands in
// shared memory are rows of 128 bytes swizzled as in wgmma.cuh, unless their descriptor says
// otherwise; D is laid out as there, A in registers as mma.cuh says of each warp's 16 rows.
#pragma once

#include "backend/cuda/device/wgmma.cuh"

namespace octet::cuda {

#define OCTET_D32                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define OCTET_OUT32(d)                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// Scores: A and B [64 keys, 16] BF16 in shared memory. With `add` false from zero.
__device__ inline void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " OCTET_D32
      ", %32, %33, p, 1, 1, 0, 0; }"
      : OCTET_OUT32(d)
      : "l"(a), "l"(b), "r"(add ? 1 : 0));
}

// Weights times values: A BF16 in registers, B [16 keys, 64] in shared memory, a row for each key.
__device__ inline void wgmma_values(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " OCTET_D32
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
      : OCTET_OUT32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}

// The same over E4M3 codes: A [64, 32 keys] in registers, B [elements, 32 keys] in shared memory,
// a row for each of 64 head elements.
__device__ inline void wgmma_code_values(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                         bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " OCTET_D32
      ", {%32, %33, %34, %35}, %36, p, 1, 1; }"
      : OCTET_OUT32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}

// D [64, 8] or [64, 16] over E4M3 codes: A [64, 32] in registers, B [8 or 16, 32] in shared memory.
__device__ inline void wgmma_codes(float (&d)[4], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %9, 0; "
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, "
      "p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}
__device__ inline void wgmma_codes(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}
// The matrix descriptor of codes in shared memory: rows of kSwizzle bytes, swizzled so; or, with 0,
// core matrices of eight rows of 16 bytes, those of neighbouring rows side by side and kBlockBytes
// from one 16 tokens to the next. The sum is in units of 16 bytes, as far as it is known
// beforehand.
template <int kSwizzle, int kBlockBytes>
__device__ inline uint64_t codes_descriptor(uint32_t address, int offset) {
  constexpr uint64_t kMode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : 0;
  constexpr uint64_t kStride = (kSwizzle == 0 ? 128 : 8 * kSwizzle) >> 4;
  constexpr uint32_t kLeading = kSwizzle == 0 ? kBlockBytes >> 4 : 1;
  return kMode << 62 | kStride << 32 | ((kLeading << 16) + (offset >> 4) + (address >> 4));
}
#undef OCTET_D32
#undef OCTET_OUT32

// Registers of each of a warpgroup's threads: more than at the start, or fewer.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace octet::cuda
