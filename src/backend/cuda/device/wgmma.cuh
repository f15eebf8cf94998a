// Hopper's warpgroup matrix product: D [64, N] (+)= A [64, k] B [N, k]ᵀ, both operands in shared
// memory as rows of 128 bytes, swizzled by 128 (16-byte chunk c of row r lies at c ^ (r % 8)),
// eight rows to 1,024 bytes. k is 32 bytes: 32 8-bit or 16 BF16 values. Thread t of the warpgroup
// holds rows 16 (t / 32) + (t % 32) / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1): d[4 j + 2 h + i]
// is row
// + 8 h, column + i.
#pragma once

#include <cstdint>

namespace octet::cuda {

enum class Operands { kBF16, kE4M3, kE4M3xE5M2 };  // of A and B

// A matrix descriptor of a tile at a shared-memory address that is a multiple of 1,024, plus a few
// steps of 32 bytes.
__device__ constexpr uint64_t wgmma_descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride | uint64_t{1} << 16 | (shared_address & 0x3FFFFu) >> 4;
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of the registers over an asynchronous product.
template <int kCount>
__device__ inline void wgmma_hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kColumns>
struct Wgmma;

template <>
struct Wgmma<8> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[4], uint64_t a, uint64_t b, bool add) {
    if constexpr (kOperands == Operands::kBF16) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3"
          "}, %4, %5, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else if constexpr (kOperands == Operands::kE4M3) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
          "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
          "%0, %1, %2, %3"
          "}, %4, %5, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
          "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {"
          "%0, %1, %2, %3"
          "}, %4, %5, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    }
  }
};

template <>
struct Wgmma<16> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[8], uint64_t a, uint64_t b, bool add) {
    if constexpr (kOperands == Operands::kBF16) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7"
          "}, %8, %9, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else if constexpr (kOperands == Operands::kE4M3) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
          "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
          "%0, %1, %2, %3, %4, %5, %6, %7"
          "}, %8, %9, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
          "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e5m2 {"
          "%0, %1, %2, %3, %4, %5, %6, %7"
          "}, %8, %9, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    }
  }
};

template <>
struct Wgmma<32> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    if constexpr (kOperands == Operands::kBF16) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
          "}, %16, %17, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else if constexpr (kOperands == Operands::kE4M3) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
          "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
          "}, %16, %17, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
          "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e5m2 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
          "}, %16, %17, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    }
  }
};

template <>
struct Wgmma<64> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    if constexpr (kOperands == Operands::kBF16) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
          "}, %32, %33, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else if constexpr (kOperands == Operands::kE4M3) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
          "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
          "}, %32, %33, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
          "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
          "}, %32, %33, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    }
  }
};

template <>
struct Wgmma<128> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    if constexpr (kOperands == Operands::kBF16) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
          "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
          "%62, %63"
          "}, %64, %65, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),
            "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
            "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
            "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),
            "+f"(d[62]), "+f"(d[63])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else if constexpr (kOperands == Operands::kE4M3) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
          "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
          "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
          "%62, %63"
          "}, %64, %65, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),
            "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
            "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
            "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),
            "+f"(d[62]), "+f"(d[63])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    } else {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
          "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
          "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
          "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
          "%62, %63"
          "}, %64, %65, p, 1, 1; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
            "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
            "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
            "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),
            "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
            "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
            "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),
            "+f"(d[62]), "+f"(d[63])
          : "l"(a), "l"(b), "r"(add ? 1 : 0));
    }
  }
};

}  // namespace octet::cuda
