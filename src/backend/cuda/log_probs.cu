// Log-probabilities, entropies and their gradient.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/row_stats.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::TensorView;

constexpr int kVectors = kSegmentColumns / (4 * kSegmentThreads);

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
template <class T>
__global__ void __launch_bounds__(kSegmentThreads)
    log_probs_backward_kernel(const float* logits, int64_t stride, Segments segments,
                              const int32_t* targets, const float* dlog_probs,
                              const float* dentropy, T* dlogits, int64_t out_stride,
                              bool stores_vectors, float temperature, int64_t num_known,
                              int64_t num_columns, int num_parts) {
  const int64_t row = blockIdx.x / static_cast<unsigned>(num_parts);
  const int begin =
      static_cast<int>(blockIdx.x % static_cast<unsigned>(num_parts)) * kSegmentColumns;
  const int width = static_cast<int>(min(num_columns - begin, int64_t{kSegmentColumns}));
  const float* from = logits + row * stride + begin;
  const bool vectors = is_vector_aligned(from);
  float z[kVectors][4];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    load_logits(from, 4 * (k * kSegmentThreads + static_cast<int>(threadIdx.x)), width, vectors,
                z[k]);
  }
  const RowStats stats =
      fold_segments(segments.stats + row * segments.count, segments.count, temperature);
  const auto inverse_sum = static_cast<float>(1 / stats.sum);
  const auto log_sum = static_cast<float>(log(stats.sum));
  const auto entropy = static_cast<float>(entropy_of(stats));
  const int32_t target = targets[row];
  const float dlog_prob = target == -1 ? 0.0f : dlog_probs[row];
  const float dh = dentropy == nullptr ? 0.0f : dentropy[row];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int first = 4 * (k * kSegmentThreads + static_cast<int>(threadIdx.x));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int id = begin + first + j;
      float value = 0;
      if (id < num_known) {
        const float distance = distance_of(z[k][j], temperature, stats.maximum);
        const float p = expf(distance) * inverse_sum;
        if (p != 0.0f) {  // p = 0 with log p = −∞ counts as 0
          value = scaled(-(p * fmaf(dh, distance - log_sum + entropy, dlog_prob)), temperature);
        }
        if (id == target) value += scaled(dlog_prob, temperature);
      }
      z[k][j] = value;
    }
    T* to = dlogits + row * out_stride + begin + first;
    if (stores_vectors && first + 4 <= width) {
      store_vector(z[k], to);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j < width) store(z[k][j], to + j);
      }
    }
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
  const Segments segments =
      segment_stats(context, args.logits, args.num_known, args.temperature, !args.entropy.empty());
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
      segment_stats(context, args.logits, args.num_known, args.temperature, true);
  const int64_t columns = args.logits.shape[1], parts = divide_up(columns, kSegmentColumns);
  const bool stores_vectors = takes_vectors(args.dlogits, 4, 4);
  const auto launch = [&](auto element) {
    using T = decltype(element);
    log_probs_backward_kernel<<<static_cast<unsigned>(rows * parts), kSegmentThreads, 0,
                                context.stream()>>>(
        args.logits.as<float>(), args.logits.row_stride, segments, args.targets.as<int32_t>(),
        args.dlog_probs.as<float>(), args.dentropy.as<float>(), args.dlogits.as<T>(),
        args.dlogits.row_stride, stores_vectors, args.temperature, args.num_known, columns,
        static_cast<int>(parts));
  };
  args.dlogits.dtype == DType::kBF16 ? launch(Bf16()) : launch(0.0f);
  check_launch(kOp);
}

}  // namespace octet::cuda
