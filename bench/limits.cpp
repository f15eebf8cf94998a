#include "bench/limits.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>

#include "backend/cpu/dispatch.h"
#include "base/error.h"
#include "tensor/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/limits.cpp"
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
HWY_INLINE FloatVec add(FloatVec x, FloatVec y) { return hn::Add(x, y); }
HWY_INLINE FloatVec multiply_add(FloatVec x, FloatVec y, FloatVec z) { return hn::MulAdd(x, y, z); }
#else
using FloatVec = float __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4;
HWY_INLINE FloatVec all(float value) { return FloatVec{value, value, value, value}; }
HWY_INLINE FloatVec add(FloatVec x, FloatVec y) { return x + y; }
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

constexpr int64_t kChains = 4;
constexpr int64_t kStep = kChains * kLanes;

HWY_INLINE FloatVec load(const float* from) {
  FloatVec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// `count` is a multiple of 64.
void read_loop(float* x, int64_t count, float* sink) {
  FloatVec sum[kChains];
  for (FloatVec& chain : sum) chain = all(0.0f);
  for (int64_t i = 0; i < count; i += kStep) {
#pragma GCC unroll 4
    for (int64_t chain = 0; chain < kChains; ++chain) {
      sum[chain] = add(sum[chain], load(x + i + chain * kLanes));
    }
  }
  float lanes[kLanes];
  for (const FloatVec& chain : sum) {
    std::memcpy(lanes, &chain, sizeof(lanes));
    *sink += lanes[0];
  }
}

void update_loop(float* x, int64_t count, float* sink) {
  const FloatVec one = all(1.0f);
  for (int64_t i = 0; i < count; i += kStep) {
#pragma GCC unroll 4
    for (int64_t chain = 0; chain < kChains; ++chain) {
      const FloatVec v = add(load(x + i + chain * kLanes), one);
      std::memcpy(x + i + chain * kLanes, &v, sizeof(v));
    }
  }
  *sink += x[0];
}

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::bench {

namespace {

double seconds_now(int num_threads) {
  timespec time;
  clock_gettime(num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

double fastest_call(int num_threads, double at_least_seconds, const std::function<void()>& call) {
  constexpr double kRunSeconds = 0.002;
  call();  // brings memory and threads up
  double best = 1e30;
  int64_t calls = 1;
  double total = 0;
  for (int runs = 0; runs < 3 || total < at_least_seconds;) {
    const double start = seconds_now(num_threads);
    for (int64_t i = 0; i < calls; ++i) call();
    const double seconds = seconds_now(num_threads) - start;
    total += seconds;
    if (seconds < kRunSeconds / 2) {  // too short to be read off
      calls *= 2;
    } else {
      best = std::min(best, seconds / static_cast<double>(calls));
      ++runs;
    }
    OCTET_ASSERT(calls < int64_t{1} << 40);
  }
  return best;
}

double measure_fma_peak(cpu::Isa isa) {
  auto* const loop = OCTET_CPU_KERNEL(isa, fma_loop);
  float sink = 0;
  int64_t operations = 0;
  const double seconds = fastest_call(1, 0.03, [&] { operations = loop(500000, &sink); });
  OCTET_ASSERT(sink > 0);
  return static_cast<double>(operations) / seconds * 1e-9;
}

double measure_stream(cpu::Isa isa, ThreadPool& pool, int64_t num_bytes, Stream stream) {
  constexpr int64_t kPart = 1 << 12;  // floats
  constexpr double kLeastSeconds = 0.02;
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  const int64_t parts = std::max<int64_t>(1, num_bytes / (kPart * 4));
  const std::unique_ptr<float, Free> x(
      static_cast<float*>(tensor::allocate_aligned(parts * kPart * 4)));
  OCTET_ASSERT(x != nullptr);
  std::fill_n(x.get(), parts * kPart, 1.0f);
  auto* const read = OCTET_CPU_KERNEL(isa, read_loop);
  auto* const update = OCTET_CPU_KERNEL(isa, update_loop);
  auto* const loop = stream == Stream::kRead ? read : update;
  const int64_t share = (parts + pool.num_threads() - 1) / pool.num_threads();
  std::atomic<float> total = 0;
  const auto pass = [&] {
    pool.parallel_for(parts, share, [&](int64_t begin, int64_t end, int) {
      float sink = 0;
      loop(x.get() + begin * kPart, (end - begin) * kPart, &sink);
      total.store(sink, std::memory_order_relaxed);
    });
  };
  const double seconds = fastest_call(pool.num_threads(), kLeastSeconds, pass);
  OCTET_ASSERT(total.load() > 0);
  return static_cast<double>(parts * kPart * 4) / seconds * 1e-9;
}

}  // namespace octet::bench
#endif
