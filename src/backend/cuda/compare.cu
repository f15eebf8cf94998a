#include "backend/cuda/compare.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

__global__ void compare_kernel(const char* a, const char* b, int64_t row_words,
                               int64_t stride_bytes, int* seen) {
  const int64_t offset = blockIdx.x * stride_bytes;
  const auto* x = reinterpret_cast<const uint32_t*>(a + offset);
  const auto* y = reinterpret_cast<const uint32_t*>(b + offset);
  for (int64_t i = threadIdx.x; i < row_words; i += blockDim.x) {
    if (x[i] != y[i]) seen[0] = 1;
    if (x[i] != 0) seen[1] = 1;
  }
}

}  // namespace

Verdict compare_rows(Context& context, const void* a, const void* b, int64_t rows,
                     int64_t row_bytes, int64_t stride_bytes) {
  auto* seen = context.scratch<int>(kScratchSampling, 2);
  context.fill_zero(seen, 2 * sizeof(int));
  compare_kernel<<<static_cast<unsigned>(rows), 256, 0, context.stream()>>>(
      static_cast<const char*>(a), static_cast<const char*>(b), row_bytes / 4, stride_bytes, seen);
  check_launch("compare");
  int host[2] = {0, 0};
  context.download(seen, host, sizeof(host));
  if (host[1] == 0) return Verdict::kNothing;
  return host[0] == 0 ? Verdict::kEqual : Verdict::kDifferent;
}

}  // namespace octet::cuda
