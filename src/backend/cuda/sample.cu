// Drawing ids, one block a row: the segments' sums lead to the one segment that is read again. All
// sums have a fixed order.
#include <algorithm>

#include <climits>

#include "backend/cuda/checks.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/row_stats.h"
#include "backend/cuda/sample_filtered.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::TensorView;

__device__ double unit_of(uint32_t random) { return static_cast<float>(random >> 8) * 0x1p-24f; }

// The first segment that holds the largest logit.
__device__ int segment_of_largest(const SegmentStats* stats, int count, float largest) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = 0; base < count; base += 32) {
    const bool has = base + lane < count && stats[base + lane].largest == largest;
    const unsigned found = __ballot_sync(kAllLanes, has);
    if (found != 0) return base + __ffs(found) - 1;
  }
  return 0;
}

struct Place {
  int segment;
  double target;  // what the cumulated e of the segment must exceed
};

// The first segment up to which the cumulated sum exceeds `target`, the last that holds anything
// where rounding leaves none. A warp works, and all its lanes receive the result.
__device__ Place segment_beyond(const SegmentStats* stats, int count, float temperature,
                                float maximum, double target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double before = 0;
  int last = 0;
  for (int base = 0; base < count; base += 32) {
    double factor = 1, sum = 0;
    if (base + lane < count) {
      factor = segment_factor(stats[base + lane].largest, temperature, maximum);
      sum = factor * stats[base + lane].sum;
    }
    const double cumulated = before + warp_prefix(sum);
    const unsigned found = __ballot_sync(kAllLanes, sum > 0 && cumulated > target);
    if (found != 0) {
      const int source = __ffs(found) - 1;
      const double within = (target - (cumulated - sum)) / factor;
      return {base + source, __shfl_sync(kAllLanes, within, source)};
    }
    const unsigned holding = __ballot_sync(kAllLanes, sum > 0);
    if (holding != 0) last = base + 31 - __clz(holding);
    before = __shfl_sync(kAllLanes, cumulated, 31);
  }
  return {last, INFINITY};
}

constexpr int kPerThread = kSegmentColumns / kSegmentThreads;

// The first id of the segment with the largest logit; 0 where the row has none.
__device__ int first_largest(const float* logits, int begin, int end, float largest) {
  __shared__ int found;
  if (threadIdx.x == 0) found = INT_MAX;
  __syncthreads();
  for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kSegmentThreads) {
    if (logits[v] == largest) {
      atomicMin(&found, v);
      break;
    }
  }
  __syncthreads();
  return found == INT_MAX || largest == -INFINITY ? 0 : found;
}

// The first id of the segment whose cumulated e exceeds `target`, the last with any where none
// does.
__device__ int first_exceeding(const float* logits, int begin, int end, float temperature,
                               float reference, double target) {
  __shared__ double warp_sums[kSegmentThreads / 32];
  __shared__ int found, last;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int within = kPerThread * static_cast<int>(threadIdx.x), from = begin + within;
  float e[kPerThread / 4][4];
#pragma unroll
  for (int k = 0; k < kPerThread / 4; ++k) {
    load_logits(logits + begin, within + 4 * k, end - begin, is_vector_aligned(logits + begin),
                e[k]);
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    float& value = e[i / 4][i % 4];
    value = expf(distance_of(value, temperature, reference));
    sum += double{value};
  }
  double cumulated = warp_prefix(sum);
  if (lane == 31) warp_sums[warp] = cumulated;
  if (threadIdx.x == 0) found = INT_MAX, last = begin;
  __syncthreads();
  for (int w = 0; w < warp; ++w) cumulated += warp_sums[w];
  if (sum > 0) {
    double before = cumulated - sum;
    int own = -1, own_last = -1;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float value = e[i / 4][i % 4];
      if (value == 0.0f) continue;
      own_last = from + i;
      before += double{value};
      if (own < 0 && before > target) own = from + i;
    }
    if (own >= 0) atomicMin(&found, own);
    atomicMax(&last, own_last);
  }
  __syncthreads();
  return found == INT_MAX ? last : found;
}

// Greedy rows, those without a filter, and those whose numbers allow nothing but the largest.
__global__ void __launch_bounds__(kSegmentThreads)
    draw_kernel(const __grid_constant__ Draw draw, const __grid_constant__ DrawRules rules) {
  await_predecessor();
  const int64_t row = blockIdx.x;
  const ops::SampleParams params = rules.rows[row];
  const bool greedy = params.temperature == 0;
  const float temperature = rules.temperature(row);
  const float* logits = draw.logits + row * draw.stride;
  const SegmentStats* segments = draw.stats + row * draw.num_segments;
  __shared__ RowStats shared_stats;
  __shared__ Place shared_place;
  if (threadIdx.x < 32) {
    const int count = draw.num_segments;
    const RowStats stats = fold_segments(segments, count, temperature);
    const Place place = greedy || !isfinite(stats.sum)
                            ? Place{segment_of_largest(segments, count, stats.largest), 0}
                            : segment_beyond(segments, count, temperature, stats.maximum,
                                             unit_of(params.random) * stats.sum);
    if (threadIdx.x == 0) shared_stats = stats, shared_place = place;
  }
  __syncthreads();
  const RowStats stats = shared_stats;
  const Place place = shared_place;
  const bool is_finite = isfinite(stats.sum);
  if (is_finite && is_filtered(params, draw.n)) return;
  const int begin = place.segment * kSegmentColumns;
  const int end = min(begin + kSegmentColumns, draw.n);
  const int id =
      greedy || !is_finite
          ? first_largest(logits, begin, end, stats.largest)
          : first_exceeding(logits, begin, end, temperature,
                            segment_reference(segments[place.segment].largest, temperature),
                            place.target);
  if (threadIdx.x != 0) return;
  const float log_prob = log_prob_of(stats, logits[id], temperature);
  draw.ids[row] = id;
  draw.log_probs[row] = log_prob;
  if (draw.kept_log_probs != nullptr) {
    draw.kept_log_probs[row] = greedy && is_finite ? 0.0f : log_prob;  // greedy keeps one id
  }
}

}  // namespace

void sample(Context& context, const ops::SampleArgs& args) {
  constexpr std::string_view kOp = "sample";
  require_rank(kOp, "logits", args.logits, 2, 2);
  require_dtype(kOp, "logits", args.logits, {DType::kF32});
  const int64_t rows = args.logits.shape[0];
  if (args.num_known < 1 || args.num_known > args.logits.shape[1]) {
    fail(kOp, "num_known must be in [1, {}], but is {}", args.logits.shape[1], args.num_known);
  }
  if (static_cast<int64_t>(args.params.size()) != rows) {
    fail(kOp, "params must have {} entries, but has {}", rows, args.params.size());
  }
  for (const ops::SampleParams& params : args.params) {
    if (!(params.temperature >= 0)) {
      fail(kOp, "temperature must be at least 0, but is {}", params.temperature);
    }
    if (!(params.top_p > 0 && params.top_p <= 1) || !(params.min_p >= 0 && params.min_p <= 1) ||
        params.top_k < 0) {
      fail(kOp, "top_p must be in (0, 1], min_p in [0, 1], top_k ≥ 0, but they are {}, {}, {}",
           params.top_p, params.min_p, params.top_k);
    }
  }
  require_vector(kOp, "ids", args.ids, DType::kI32, rows);
  require_vector(kOp, "log_probs", args.log_probs, DType::kF32, rows);
  if (!args.kept_log_probs.empty()) {
    require_vector(kOp, "kept_log_probs", args.kept_log_probs, DType::kF32, rows);
  }
  for (int64_t first = 0; first < rows; first += kDrawRows) {
    const int64_t count = std::min<int64_t>(rows - first, kDrawRows);
    DrawRules rules;
    std::copy_n(args.params.begin() + first, count, rules.rows);
    const TensorView logits = args.logits.slice_rows(first, count);
    const Segments segments = segment_stats(context, logits, args.num_known, rules);
    const Draw draw{.logits = logits.as<float>(),
                    .stride = logits.row_stride,
                    .n = static_cast<int>(args.num_known),
                    .stats = segments.stats,
                    .num_segments = segments.count,
                    .ids = args.ids.as<int32_t>() + first,
                    .log_probs = args.log_probs.as<float>() + first,
                    .kept_log_probs = args.kept_log_probs.empty()
                                          ? nullptr
                                          : args.kept_log_probs.as<float>() + first};
    launch(kOp, context, {dim3(static_cast<unsigned>(count)), kSegmentThreads}, draw_kernel, draw,
           rules);
    const auto is_limited = [&](const ops::SampleParams& params) {
      return is_filtered(params, args.num_known);
    };
    if (std::any_of(rules.rows, rules.rows + count, is_limited)) {
      draw_filtered(context, draw, rules, static_cast<int>(count));
    }
  }
}

}  // namespace octet::cuda
