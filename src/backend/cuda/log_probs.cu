// Log-probabilities, entropies and their gradient.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_stats.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::TensorView;

__device__ double entropy_of(const RowStats& stats) {
  return log(stats.sum) - stats.weighted / stats.sum;
}

__global__ void __launch_bounds__(kRowThreads)
    log_probs_kernel(const float* logits, int64_t stride, const int32_t* targets, float* log_probs,
                     float* entropy, float temperature, int64_t num_known) {
  const float* row = logits + blockIdx.x * stride;
  const RowStats stats = row_stats(row, num_known, temperature);
  if (threadIdx.x != 0) return;
  if (entropy != nullptr) entropy[blockIdx.x] = static_cast<float>(entropy_of(stats));
  if (log_probs == nullptr) return;
  const int32_t target = targets[blockIdx.x];
  log_probs[blockIdx.x] = target == -1 ? 0.0f
                          : target < 0 || target >= num_known
                              ? -INFINITY
                              : log_prob_of(stats, row[target], temperature);
}

// dlogits may be the logits themselves: each element is read once, by the thread that writes it,
// after all have been read for the sums.
__global__ void __launch_bounds__(kRowThreads)
    log_probs_backward_kernel(const float* logits, int64_t stride, const int32_t* targets,
                              const float* dlog_probs, const float* dentropy, FloatArray dlogits,
                              int64_t out_stride, float temperature, int64_t num_known,
                              int64_t num_columns) {
  const int64_t c = blockIdx.x;
  const float* row = logits + c * stride;
  const RowStats stats = row_stats(row, num_known, temperature);
  const auto inverse_sum = static_cast<float>(1 / stats.sum);
  const auto log_sum = static_cast<float>(log(stats.sum));
  const auto entropy = static_cast<float>(entropy_of(stats));
  const int32_t target = targets[c];
  const float dlog_prob = target == -1 ? 0.0f : dlog_probs[c];
  const float dh = dentropy == nullptr ? 0.0f : dentropy[c];
  for (int64_t i = threadIdx.x; i < num_columns; i += kRowThreads) {
    float value = 0;
    if (i < num_known) {
      const float distance = distance_of(row[i], temperature, stats.maximum);
      const float p = expf(distance) * inverse_sum;
      if (p != 0.0f) {  // p = 0 with log p = −∞ counts as 0
        value = __fdiv_rn(-(p * fmaf(dh, distance - log_sum + entropy, dlog_prob)), temperature);
      }
      if (i == target) value += __fdiv_rn(dlog_prob, temperature);
    }
    dlogits.set(c * out_stride + i, value);
  }
}

void check_logits(std::string_view op, const TensorView& logits, int64_t num_known,
                  float temperature) {
  require_rank(op, "logits", logits, 2, 2);
  require_dtype(op, "logits", logits, {DType::kF32});
  if (num_known < 1 || num_known > logits.shape[1]) {
    fail(op, "num_known must be in [1, {}], but is {}", logits.shape[1], num_known);
  }
  if (!(temperature > 0)) fail(op, "temperature must be above 0, but is {}", temperature);
}

}  // namespace

void log_probs(Context& context, const ops::LogProbsArgs& args) {
  constexpr std::string_view kOp = "log_probs";
  check_logits(kOp, args.logits, args.num_known, args.temperature);
  const int64_t rows = args.logits.shape[0];
  if (!args.log_probs.empty()) {
    require_vector(kOp, "log_probs", args.log_probs, DType::kF32, rows);
    require_vector(kOp, "targets", args.targets, DType::kI32, rows);
  }
  if (!args.entropy.empty()) require_vector(kOp, "entropy", args.entropy, DType::kF32, rows);
  if (rows == 0) return;
  log_probs_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, context.stream()>>>(
      args.logits.as<float>(), args.logits.row_stride, args.targets.as<int32_t>(),
      args.log_probs.as<float>(), args.entropy.as<float>(), args.temperature, args.num_known);
  check_launch(kOp);
}

void log_probs_backward(Context& context, const ops::LogProbsBackwardArgs& args) {
  constexpr std::string_view kOp = "log_probs_backward";
  check_logits(kOp, args.logits, args.num_known, args.temperature);
  const int64_t rows = args.logits.shape[0];
  require_vector(kOp, "targets", args.targets, DType::kI32, rows);
  require_vector(kOp, "dlog_probs", args.dlog_probs, DType::kF32, rows);
  if (!args.dentropy.empty()) require_vector(kOp, "dentropy", args.dentropy, DType::kF32, rows);
  require_float(kOp, "dlogits", args.dlogits);
  require_shape(kOp, "dlogits", args.dlogits, args.logits.shape);
  if (rows == 0) return;
  log_probs_backward_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, context.stream()>>>(
      args.logits.as<float>(), args.logits.row_stride, args.targets.as<int32_t>(),
      args.dlog_probs.as<float>(), args.dentropy.as<float>(),
      {args.dlogits.data, args.dlogits.dtype == DType::kBF16}, args.dlogits.row_stride,
      args.temperature, args.num_known, args.logits.shape[1]);
  check_launch(kOp);
}

}  // namespace octet::cuda
