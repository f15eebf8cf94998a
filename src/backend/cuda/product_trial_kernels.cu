#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_trial_kernels.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// splitmix64's finaliser. https://prng.di.unimi.it/splitmix64.c
__device__ uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
__device__ uint32_t bits_at(uint32_t seed, int64_t index) {
  return static_cast<uint32_t>(
      mix((uint64_t{seed} << 40) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15u));
}

struct Code {
  using Type = uint8_t;
  __device__ static uint8_t make(uint32_t bits) {
    return static_cast<uint8_t>(0x28 + (bits & 0xFFFF) % 0x38 + (bits >> 31 << 7));
  }
};
struct Bf16 {
  using Type = uint16_t;
  __device__ static uint16_t make(uint32_t bits) {
    const uint32_t exponent = 124 + (bits >> 8 & 0xFF) % 7;
    return static_cast<uint16_t>(bits >> 31 << 15 | exponent << 7 | (bits & 0x7F));
  }
};
struct Scale {
  using Type = float;
  __device__ static float make(uint32_t bits) {
    return 0.5f + static_cast<float>(bits >> 8) * 0x1p-24f;
  }
};

template <class Kind>
__global__ void fill_kernel(typename Kind::Type* to, int64_t count, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    to[i] = Kind::make(bits_at(seed, i));
  }
}

template <class Kind>
void fill(Context& context, typename Kind::Type* to, int64_t count, uint32_t seed) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(divide_up(count, kThreads), 8192));
  fill_kernel<Kind><<<blocks, kThreads, 0, context.stream()>>>(to, count, seed);
  check_launch("fill");
}

__global__ void digest_kernel(const char* data, int64_t row_words, int64_t stride_bytes,
                              unsigned long long* digests) {
  const auto* words = reinterpret_cast<const uint32_t*>(data + blockIdx.x * stride_bytes);
  unsigned long long sum = 0;
  for (int64_t i = threadIdx.x; i < row_words; i += kThreads) {
    if (words[i] != 0) sum += mix(static_cast<uint64_t>(i) << 32 | words[i]);
  }
  atomicAdd(digests + blockIdx.x, sum);
}

__global__ void pause_kernel(int64_t nanoseconds) {
  uint64_t begin = 0, now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<uint64_t>(nanoseconds));
}

__global__ void small_kernel() {
  invite_successor();
  await_predecessor();
  const int64_t begin = clock64();
  while (clock64() - begin < 3600) {
  }
}

}  // namespace

void fill_codes(Context& context, uint8_t* codes, int64_t count, uint32_t seed) {
  fill<Code>(context, codes, count, seed);
}
void fill_bf16(Context& context, uint16_t* values, int64_t count, uint32_t seed) {
  fill<Bf16>(context, values, count, seed);
}
void fill_scales(Context& context, float* scales, int64_t count, uint32_t seed) {
  fill<Scale>(context, scales, count, seed);
}

std::vector<uint64_t> digest_rows(Context& context, const void* data, int64_t rows,
                                  int64_t row_bytes, int64_t stride_bytes) {
  std::vector<uint64_t> digests(static_cast<size_t>(rows));
  auto* on_device = context.scratch<unsigned long long>(kScratchSums, rows);
  context.fill_zero(on_device, 8 * rows);
  digest_kernel<<<static_cast<unsigned>(rows), kThreads, 0, context.stream()>>>(
      static_cast<const char*>(data), row_bytes / 4, stride_bytes, on_device);
  check_launch("digest_rows");
  context.download(on_device, digests.data(), 8 * rows);
  return digests;
}

void run_small_kernel(Context& context) {
  launch("run_small_kernel", context, {dim3(64), kThreads}, small_kernel);
}

void pause_stream(Context& context, int64_t nanoseconds) {
  pause_kernel<<<1, 1, 0, context.stream()>>>(nanoseconds);
  check_launch("pause_stream");
}

}  // namespace octet::cuda
