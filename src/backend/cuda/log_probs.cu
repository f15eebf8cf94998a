// Log-probabilities, entropies and their gradient.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/row_stats.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::TensorView;

__device__ double entropy_of(const RowStats& stats) {
  return log(stats.sum) - stats.weighted / stats.sum;
}

// A warp takes a row.
__global__ void log_probs_kernel(const float* logits, int64_t stride, Segments segments,
                                 const int32_t* targets, float* log_probs, float* entropy,
                                 int64_t num_rows, float temperature, int64_t num_known) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= num_rows) return;
  const RowStats stats =
      fold_segments(segments.stats + row * segments.count, segments.count, temperature);
  if (threadIdx.x != 0) return;
  if (entropy != nullptr) entropy[row] = static_cast<float>(entropy_of(stats));
  if (log_probs == nullptr) return;
  const int32_t target = targets[row];
  log_probs[row] = target == -1 ? 0.0f
                   : target < 0 || target >= num_known
                       ? -INFINITY
                       : log_prob_of(stats, logits[row * stride + target], temperature);
}

// dlogits may be the logits themselves: each element is read once, by the thread that writes it,
// after all have been read for the sums. A block takes a part of a row, a segment wide.
__global__ void __launch_bounds__(kSegmentThreads)
    log_probs_backward_kernel(const float* logits, int64_t stride, Segments segments,
                              const int32_t* targets, const float* dlog_probs,
                              const float* dentropy, FloatArray dlogits, int64_t out_stride,
                              float temperature, int64_t num_known, int64_t num_columns,
                              int num_parts) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(num_parts);
  const int64_t begin = int64_t{blockIdx.x % static_cast<unsigned>(num_parts)} * kSegmentColumns;
  const int64_t end = min(begin + kSegmentColumns, num_columns);
  const float* from = logits + row * stride;
  const RowStats stats =
      fold_segments(segments.stats + row * segments.count, segments.count, temperature);
  const auto inverse_sum = static_cast<float>(1 / stats.sum);
  const auto log_sum = static_cast<float>(log(stats.sum));
  const auto entropy = static_cast<float>(entropy_of(stats));
  const int32_t target = targets[row];
  const float dlog_prob = target == -1 ? 0.0f : dlog_probs[row];
  const float dh = dentropy == nullptr ? 0.0f : dentropy[row];
  for (int64_t i = begin + threadIdx.x; i < end; i += kSegmentThreads) {
    float value = 0;
    if (i < num_known) {
      const float distance = distance_of(from[i], temperature, stats.maximum);
      const float p = expf(distance) * inverse_sum;
      if (p != 0.0f) {  // p = 0 with log p = −∞ counts as 0
        value = __fdiv_rn(-(p * fmaf(dh, distance - log_sum + entropy, dlog_prob)), temperature);
      }
      if (i == target) value += __fdiv_rn(dlog_prob, temperature);
    }
    dlogits.set(row * out_stride + i, value);
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
  const Segments segments = segment_stats(context, args.logits, args.num_known,
                                          {args.temperature, nullptr}, !args.entropy.empty());
  const dim3 block(32, 8);
  log_probs_kernel<<<static_cast<unsigned>(divide_up(rows, block.y)), block, 0, context.stream()>>>(
      args.logits.as<float>(), args.logits.row_stride, segments, args.targets.as<int32_t>(),
      args.log_probs.as<float>(), args.entropy.as<float>(), rows, args.temperature, args.num_known);
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
  const Segments segments =
      segment_stats(context, args.logits, args.num_known, {args.temperature, nullptr}, true);
  const int64_t columns = args.logits.shape[1], parts = divide_up(columns, kSegmentColumns);
  log_probs_backward_kernel<<<static_cast<unsigned>(rows * parts), kSegmentThreads, 0,
                              context.stream()>>>(
      args.logits.as<float>(), args.logits.row_stride, segments, args.targets.as<int32_t>(),
      args.dlog_probs.as<float>(), args.dentropy.as<float>(),
      {args.dlogits.data, args.dlogits.dtype == DType::kBF16}, args.dlogits.row_stride,
      args.temperature, args.num_known, columns, static_cast<int>(parts));
  check_launch(kOp);
}

}  // namespace octet::cuda
