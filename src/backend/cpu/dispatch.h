// Which copies of a kernel are compiled, and which one runs. A kernel file looks like this:
//
//   #include "backend/cpu/dispatch.h"
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "backend/cpu/NAME_kernels.cpp"
//   #include <hwy/foreach_target.h>
//   #include <hwy/highway.h>
//   HWY_BEFORE_NAMESPACE();
//   namespace octet::cpu::HWY_NAMESPACE { … void f(…) … }
//   HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   namespace octet::cpu { auto* kernel = OCTET_CPU_KERNEL(isa, f); … }
//   #endif
//
// Highway's own dispatch would need its library at run time; ours is a choice by Isa.
#pragma once

#include "backend/cpu/isa.h"

#if defined(__x86_64__)
// Of the x86 targets (bits 0 to 14) AVX-512, AVX2 and the baseline (bit 14 in newer versions).
#define HWY_DISABLED_TARGETS (0x7FFFLL & ~(HWY_AVX3 | HWY_AVX2 | (1LL << 14)))
#define OCTET_CPU_KERNEL(isa, function)                                 \
  ((isa) == ::octet::cpu::Isa::kAvx512 ? ::octet::cpu::N_AVX3::function \
   : (isa) == ::octet::cpu::Isa::kAvx2 ? ::octet::cpu::N_AVX2::function \
                                       : ::octet::cpu::HWY_NAMESPACE::function)
#else
#define HWY_COMPILE_ONLY_STATIC
#define OCTET_CPU_KERNEL(isa, function) \
  (static_cast<void>(isa), ::octet::cpu::HWY_NAMESPACE::function)
#endif
