#include "backend/cuda/product_bench.h"

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr double kSearchSeconds = 0.25;  // longer than where somebody waits

// Bytes read and written in a microsecond by the driver's own copy.
double copy_rate(Context& context) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  constexpr int kRuns = 8;
  const tensor::Buffer from = context.allocator().allocate(kBytes, "bench");
  const tensor::Buffer to = context.allocator().allocate(kBytes, "bench");
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "bench");
  check(cudaEventCreate(&end), "bench");
  for (int i = 0; i <= kRuns; ++i) {
    if (i == 1) check(cudaEventRecord(begin, context.stream()), "bench");
    check(
        cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, context.stream()),
        "bench");
  }
  check(cudaEventRecord(end, context.stream()), "bench");
  check(cudaEventSynchronize(end), "bench");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "bench");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 2.0 * kBytes * kRuns / (1e3 * milliseconds);
}

// Operations in a microsecond: Hopper's multiprocessors do 4,096 in BF16 and 8,192 in FP8 a clock.
double multiply_rate(Context& context, ProductFormat format) {
  int kilohertz = 0;
  check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, context.device()), "bench");
  return 1e-3 * kilohertz * context.num_multiprocessors() *
         (format == ProductFormat::kBF16 ? 4096 : 8192);
}

}  // namespace

void measure_products(const CudaOptions& options, std::span<const ProductKey> products,
                      const std::function<void(const ProductTiming&)>& report) {
  Context context(options.device, options.memory_limit_bytes);
  if (options.inexact_products) context.library().set_inexact();
  context.library().set_search_seconds(kSearchSeconds);
  const double bytes_rate = copy_rate(context);
  for (const ProductKey& key : products) {
    const int64_t each = key.format == ProductFormat::kBF16 ? 2 : 1;
    const int64_t bytes = (key.rows + key.tokens) * key.depth * each +
                          key.rows * key.tokens * (key.y_is_bf16 ? 2 : 4);
    const double operations = 2.0 * static_cast<double>(key.rows * key.depth * key.tokens);
    report({key, context.library().search(context, key), static_cast<double>(bytes) / bytes_rate,
            operations / multiply_rate(context, key.format)});
  }
}

}  // namespace octet::cuda
