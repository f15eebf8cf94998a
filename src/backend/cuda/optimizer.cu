// AdamW and the squared norm; sums in F64 in a fixed order.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "ops/adamw_factors.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::TensorView;

constexpr int kThreads = 256;
constexpr int64_t kRange = 1 << 14;  // elements to a block; part of what fixes the order of sums

__global__ void adamw_kernel(ops::AdamWFactors f, const float* gradient, float* master,
                             float* first, float* second, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const float g = gradient[i] * f.gradient_scale;
    const float m = first[i] * f.beta1 + g * f.one_minus_beta1;
    const float v = second[i] * f.beta2 + g * g * f.one_minus_beta2;
    const float w = master[i] - master[i] * f.decay;
    const float root = __fsqrt_rn(v) * f.second_moment_root;
    first[i] = m;
    second[i] = v;
    master[i] = w - __fdiv_rn(m * f.step_size, root + f.eps);
  }
}

__global__ void squared_norm_kernel(FloatArray x, int64_t count, ops::SquaredNorm* parts) {
  const int64_t begin = int64_t{blockIdx.x} * kRange, end = min(begin + kRange, count);
  double sum = 0;
  int bad = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float value = x.get(i);
    const bool finite = fabsf(value) <= 3.402823466e38f;
    bad += finite ? 0 : 1;
    if (finite) sum = fma(double{value}, double{value}, sum);
  }
  sum = block_sum(sum);
  bad = block_sum(bad);
  if (threadIdx.x == 0) parts[blockIdx.x] = {sum, bad};
}

}  // namespace

void adamw(Context& context, const ops::AdamWArgs& args) {
  constexpr std::string_view kOp = "adamw";
  const int64_t count = args.master.num_elements();
  for (const auto& [name, view] :
       {std::pair<const char*, const TensorView*>{"master", &args.master},
        {"gradient", &args.gradient},
        {"first_moment", &args.first_moment},
        {"second_moment", &args.second_moment}}) {
    require_dtype(kOp, name, *view, {DType::kF32});
    require_contiguous(kOp, name, *view);
    if (view->num_elements() != count || (view->empty() && count > 0)) {
      fail(kOp, "{} must have {} elements, as the master has, but has {}", name, count,
           view->empty() ? 0 : view->num_elements());
    }
  }
  if (args.step < 1) fail(kOp, "step must be at least 1, but is {}", args.step);
  if (count == 0) return;
  const ops::AdamWFactors factors = ops::adamw_factors(args);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(divide_up(count, kThreads), 16384));
  adamw_kernel<<<blocks, kThreads, 0, context.stream()>>>(
      factors, args.gradient.as<float>(), args.master.as<float>(), args.first_moment.as<float>(),
      args.second_moment.as<float>(), count);
  check_launch(kOp);
}

ops::SquaredNorm squared_norm(Context& context, const TensorView& x) {
  constexpr std::string_view kOp = "squared_norm";
  require_float(kOp, "x", x);
  require_contiguous(kOp, "x", x);
  const int64_t count = x.num_elements();
  if (count > 0 && x.empty()) fail(kOp, "x is missing");
  ops::SquaredNorm total;
  if (count == 0) return total;
  const int64_t num_parts = divide_up(count, kRange);
  auto* parts = context.scratch<ops::SquaredNorm>(kScratchSums, num_parts);
  squared_norm_kernel<<<static_cast<unsigned>(num_parts), kThreads, 0, context.stream()>>>(
      {x.data, x.dtype == DType::kBF16}, count, parts);
  check_launch(kOp);
  std::vector<ops::SquaredNorm> host(static_cast<size_t>(num_parts));
  context.download(parts, host.data(), num_parts * static_cast<int64_t>(sizeof(ops::SquaredNorm)));
  for (const ops::SquaredNorm& part : host) {
    total.sum += part.sum;
    total.non_finite += part.non_finite;
  }
  return total;
}

}  // namespace octet::cuda
