// Both backends side by side; tests are skipped, with the reason, where there is no device.
#pragma once

#include <limits>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "parity/cuda/mirror_backend.h"
#include "parity/ops/op_test.h"

namespace octet::parity {

class CudaTest : public ::testing::Test {
 protected:
  // The device goes before the process ends.
  static void TearDownTestSuite() {
    gpu_.reset();
    portable_gpu_.reset();
  }
  static void SetUpTestSuite() {
    std::string why_none;
    for (const cuda::DeviceInfo& device : cuda::devices(why_none)) {
      if (!device.usable) {
        why_none = device.why_not;
        continue;
      }
      gpu_ = std::make_unique<MirrorBackend>(cuda::make_cuda_backend({.device = device.index}));
      portable_gpu_ = std::make_unique<MirrorBackend>(
          cuda::make_cuda_backend({.device = device.index, .portable = true}));
      break;
    }
    why_none_ = why_none;
  }
  void SetUp() override {
    if (gpu_ == nullptr) GTEST_SKIP() << "no CUDA device: " << why_none_;
  }

  virtual ops::Backend& gpu() { return *gpu_; }
  ops::Backend& gpu_device() { return gpu_->device(); }    // on its own memory
  ops::Backend& portable_gpu() { return *portable_gpu_; }  // with the kernels of every architecture
  ops::Backend& cpu() { return *cpu_; }
  ops::Backend& device() { return gpu_->device(); }  // without the mirror

  // |actual − expected| ≤ absolute + relative × |expected|, NaN and infinities alike.
  static void expect_same(const Array& actual, const Array& expected, Tolerance tolerance,
                          const std::string& what) {
    expect_near(actual.values(), expected.values(), tolerance, what);
  }
  static Array copy(const Array& array) {
    Array result(array.view().dtype, array.view().shape,
                 array.view().row_stride - array.view().row_elements());
    std::memcpy(result.view().data, array.bytes().data(), array.bytes().size());
    return result;
  }

 private:
  inline static std::unique_ptr<MirrorBackend> gpu_, portable_gpu_;
  inline static std::string why_none_;
  std::unique_ptr<ops::Backend> cpu_ = octet::cpu::make_cpu_backend({.num_threads = 2});
};

// One rounding to BF16, where both round nearly the same F32 value.
inline constexpr Tolerance kOneBf16{1e-5, 0x1p-7};
inline constexpr Tolerance kF32{2e-6, 1e-5};

// Values over the whole range of BF16, both signs, with the special ones strewn in.
inline std::vector<double> hostile_values(int64_t count, uint32_t seed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, -kNaN, 1e-45f, 3e38f};
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t exponent = 97 + (seed >> 24) % 50;
    value = std::bit_cast<float>((seed & 0x80000000u) | exponent << 23 | (seed >> 3 & 0x7FFFFFu));
    if (seed >> 8 & 1 && (seed >> 9 & 15) == 0) value = special[seed >> 13 & 7];
  }
  return values;
}

}  // namespace octet::parity
