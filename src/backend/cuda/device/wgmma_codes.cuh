// The products of codes with 48 and 96 columns, laid out as those in wgmma.cuh.
#pragma once

#include "backend/cuda/device/wgmma.cuh"

namespace octet::cuda {

// clang-format off
#define OCTET_OUT8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
// clang-format on

template <>
struct Wgmma<48> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[24], uint64_t a, uint64_t b, bool add) {
    static_assert(kOperands == Operands::kE4M3);
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %26, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23"
        "}, %24, %25, p, 1, 1; }"
        : OCTET_OUT8(0), OCTET_OUT8(8), OCTET_OUT8(16)
        : "l"(a), "l"(b), "r"(add ? 1 : 0));
  }
};

template <>
struct Wgmma<96> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[48], uint64_t a, uint64_t b, bool add) {
    static_assert(kOperands == Operands::kE4M3);
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %50, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, %48, %49, p, 1, 1; }"
        : OCTET_OUT8(0), OCTET_OUT8(8), OCTET_OUT8(16), OCTET_OUT8(24), OCTET_OUT8(32),
          OCTET_OUT8(40)
        : "l"(a), "l"(b), "r"(add ? 1 : 0));
  }
};

#undef OCTET_OUT8

}  // namespace octet::cuda
