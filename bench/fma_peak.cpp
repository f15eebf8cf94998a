#include <algorithm>
#include <chrono>
#include <cstring>

#include "backend/cpu/dispatch.h"
#include "base/error.h"
#include "bench/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/fma_peak.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using FloatVec = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));
HWY_INLINE FloatVec all(float value) { return hn::Set(F32(), value); }
HWY_INLINE FloatVec multiply_add(FloatVec x, FloatVec y, FloatVec z) { return hn::MulAdd(x, y, z); }
#else
using FloatVec = float __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4;
HWY_INLINE FloatVec all(float value) { return FloatVec{value, value, value, value}; }
HWY_INLINE FloatVec multiply_add(FloatVec x, FloatVec y, FloatVec z) { return x * y + z; }
#endif

// Twelve independent chains hide the latency. Returns the number of operations; the result is
// written to `sink` so that the work is done.
int64_t fma_loop(int64_t iterations, float* sink) {
  constexpr int kChains = 12;
  FloatVec sum[kChains];
  for (int chain = 0; chain < kChains; ++chain) sum[chain] = all(static_cast<float>(chain));
  const FloatVec factor = all(0.999f);
  const FloatVec term = all(0.25f);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; ++chain) {
      sum[chain] = multiply_add(sum[chain], factor, term);
    }
  }
  float lanes[kLanes];
  for (const FloatVec& v : sum) {
    std::memcpy(lanes, &v, sizeof(lanes));
    *sink += lanes[0];
  }
  return iterations * kChains * kLanes * 2;
}

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::bench {

double measure_fma_peak(cpu::Isa isa) {
  using Clock = std::chrono::steady_clock;
  auto* const loop = OCTET_CPU_KERNEL(isa, fma_loop);
  float sink = 0;
  double best = 0;
  for (int run = 0; run < 20; ++run) {
    const auto start = Clock::now();
    const int64_t operations = loop(500000, &sink);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(operations) / seconds * 1e-9);
  }
  OCTET_ASSERT(sink > 0);
  return best;
}

}  // namespace octet::bench
#endif
