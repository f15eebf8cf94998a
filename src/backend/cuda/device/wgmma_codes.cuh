// Products of codes with more columns than wgmma.cuh has, laid out as there.
#pragma once

#include "backend/cuda/device/wgmma.cuh"

namespace octet::cuda {

// clang-format off
#define OCTET_OUT8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
#define OCTET_OUT48(i) \
  OCTET_OUT8(i), OCTET_OUT8(i + 8), OCTET_OUT8(i + 16), OCTET_OUT8(i + 24), OCTET_OUT8(i + 32), \
  OCTET_OUT8(i + 40)
// clang-format on

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
        : OCTET_OUT48(0)
        : "l"(a), "l"(b), "r"(add ? 1 : 0));
  }
};

template <>
struct Wgmma<192> {
  template <Operands kOperands>
  __device__ static void run(float (&d)[96], uint64_t a, uint64_t b, bool add) {
    static_assert(kOperands == Operands::kE4M3);
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %98, 0; "
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
        "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
        "%92, %93, %94, %95"
        "}, %96, %97, p, 1, 1; }"
        : OCTET_OUT48(0), OCTET_OUT48(48)
        : "l"(a), "l"(b), "r"(add ? 1 : 0));
  }
};

#undef OCTET_OUT48
#undef OCTET_OUT8

}  // namespace octet::cuda
