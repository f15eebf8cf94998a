#include "bench/device_limits.h"

#include <algorithm>
#include <optional>

#include "bench/operands.h"

namespace octet::bench {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::TensorView;

// FLOP/s of x [size, size] · w [size, size]ᵀ, to BF16.
double product_flops(ops::Backend& backend, int64_t size, std::optional<Granularity> weights) {
  Operands operands(backend);
  const TensorView x = operands.random({size, size});
  const TensorView y = operands.zeros(DType::kBF16, {size, size});
  ops::Weight weight;
  weight.dense = operands.random({size, size}, 0.02);
  ops::LinearArgs args{.x = x, .xq = {}, .weights = {&weight, 1}, .bias = {}, .y = y};
  if (weights) {
    weight.quantized = operands.quantized(weight.dense, *weights);
    args.x = {};
    args.xq = operands.quantized(
        x, *weights == Granularity::kBlock ? Granularity::kRowBlock : Granularity::kRow);
  }
  const double seconds = best_seconds(backend, [&] { backend.linear(args); });
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / seconds;
}

}  // namespace

double best_seconds(ops::Backend& backend, const std::function<void()>& body) {
  constexpr double kRunSeconds = 0.01;
  constexpr int kRuns = 3;
  body();  // searches, workspaces, memory
  const double once = backend.time_seconds(body, 1);
  const int repeats = static_cast<int>(std::clamp(kRunSeconds / once, 1.0, 1000.0));
  double best = once;
  for (int i = 0; i < kRuns; ++i) best = std::min(best, backend.time_seconds(body, repeats));
  return best;
}

double measure_copy_bandwidth(ops::Backend& backend) {
  constexpr int64_t kLargest = int64_t{1} << 30;  // bytes
  constexpr double kLongEnough = 4e-4;            // seconds, of a copy
  for (int64_t bytes = kLargest / 16;; bytes *= 2) {
    Operands operands(backend);
    const TensorView from = operands.zeros(DType::kF32, {bytes / 4});
    const TensorView to = operands.zeros(DType::kF32, {bytes / 4});
    const double seconds = best_seconds(backend, [&] { backend.convert(from, to); });
    if (seconds < kLongEnough && bytes < kLargest) continue;
    return 2 * static_cast<double>(bytes) / seconds;
  }
}

DeviceLimits measure_device_limits(ops::Backend& backend) {
  // A product of 1,024 tells whether one of 8,192 takes a millisecond or minutes.
  constexpr int64_t kSmall = 1024, kLarge = 8192;
  DeviceLimits limits;
  limits.bf16_flops = product_flops(backend, kSmall, std::nullopt);
  const int64_t size = limits.slow() ? kSmall : kLarge;
  limits.copy_bandwidth = measure_copy_bandwidth(backend);
  limits.bf16_flops = product_flops(backend, size, std::nullopt);
  for (const auto granularity : {Granularity::kTensor, Granularity::kRow, Granularity::kBlock}) {
    limits.fp8_flops = std::max(limits.fp8_flops, product_flops(backend, size, granularity));
  }
  return limits;
}

}  // namespace octet::bench
