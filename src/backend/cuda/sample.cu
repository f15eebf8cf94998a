// Drawing ids, one block a row. Without a filter the segments' sums lead to the one segment that is
// read again. With one, the ids are never sorted: where top_k and top_p cut is found by halving the
// range of weights, the drawn id by narrowing down the range of ids. All sums have a fixed order.
#include <algorithm>

#include <climits>

#include "backend/cuda/checks.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/row_stats.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;

constexpr int kRowThreads = 512;  // of a filtered row
constexpr int kWarps = kRowThreads / 32;
constexpr unsigned kOneBits = 0x3F800000u;  // of the largest weight, e^0

// Kept are the weights above `weight`, and those equal to it up to id `id`.
struct Cut {
  float weight;
  int64_t id;
  __device__ bool keeps(float e, int64_t v) const { return e > weight || (e == weight && v <= id); }
};

struct Row {
  const float* logits;
  int64_t n;
  float temperature, maximum;
  __device__ float weight(int64_t v) const {
    return expf(distance_of(logits[v], temperature, maximum));
  }
};

// Σ value(v) over the row.
template <class Value>
__device__ double total_of(const Row& row, const Value& value) {
  double sum = 0;
  for (int64_t v = threadIdx.x; v < row.n; v += kRowThreads) sum += value(v);
  return block_sum(sum);
}

// The first id, in order, whose cumulated value exceeds share × total; where rounding leaves none,
// the last with a value. `total` receives the sum it goes by. All threads return the same.
template <class Value>
__device__ int64_t first_beyond(int64_t n, const Value& value, double share, double target_or_nan,
                                double* total) {
  __shared__ double parts[kWarps];
  __shared__ int64_t found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t begin = 0, end = n;
  double before = 0, target = target_or_nan;
  bool first = true;
  while (first || end - begin > 32) {
    const int64_t part = (end - begin + kWarps - 1) / kWarps;
    const int64_t from = begin + warp * part, to = min(from + part, end);
    double sum = 0;
    for (int64_t v = from + lane; v < to; v += 32) sum += value(v);
    sum = warp_reduce(sum, Sum());
    __syncthreads();
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    if (first) {
      double all = 0;
      for (int w = 0; w < kWarps; ++w) all += parts[w];
      *total = all;
      if (isnan(target)) target = share * all;
    }
    first = false;
    int chosen = -1, last = 0;
    double sum_before = before;
    for (int w = 0; w < kWarps; ++w) {
      if (parts[w] == 0) continue;
      last = w;
      if (sum_before + parts[w] > target) {
        chosen = w;
        break;
      }
      sum_before += parts[w];
    }
    if (chosen < 0) {  // rounding: the last part that holds anything
      chosen = last;
      sum_before = before;
      for (int w = 0; w < last; ++w) sum_before += parts[w];
    }
    before = sum_before;
    begin = min(begin + chosen * part, end);
    end = min(begin + part, end);
  }
  if (threadIdx.x == 0) {
    int64_t id = begin;
    for (int64_t v = begin; v < end; ++v) {
      const double one = value(v);
      if (one == 0) continue;
      id = v;
      before += one;
      if (before > target) break;
    }
    found = id;
  }
  __syncthreads();
  return found;
}

// The largest weight w (as bits) with Σ value(v) over weights ≥ w at least `least`.
template <class Value>
__device__ float weight_reaching(const Row& row, const Value& value, double least) {
  unsigned low = 0, high = kOneBits;  // w = low reaches it
  while (low < high) {
    const unsigned middle = low + (high - low + 1) / 2;
    const float bound = __uint_as_float(middle);
    const double sum =
        total_of(row, [&](int64_t v) { return row.weight(v) >= bound ? value(v) : 0.0; });
    if (sum >= least) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return __uint_as_float(low);
}

// The id of the `count`-th weight equal to `weight`.
__device__ int64_t id_of_equal(const Row& row, float weight, double count) {
  double total = 0;
  return first_beyond(
      row.n, [&](int64_t v) { return row.weight(v) == weight ? 1.0 : 0.0; }, 0, count - 0.5,
      &total);
}

// The last of what top_k and top_p keep.
__device__ Cut last_kept(const Row& row, double sum, const ops::SampleParams& params) {
  Cut cut{0.0f, row.n - 1};
  if (params.top_k > 0 && params.top_k < row.n) {
    const auto one = [](int64_t) { return 1.0; };
    cut.weight = weight_reaching(row, one, params.top_k);
    const float bound = cut.weight;
    const double above =
        total_of(row, [&](int64_t v) { return row.weight(v) > bound ? 1.0 : 0.0; });
    cut.id = id_of_equal(row, cut.weight, params.top_k - above);
    if (params.top_p >= 1) return cut;
    sum = total_of(row, [&](int64_t v) {
      const float e = row.weight(v);
      return cut.keeps(e, v) ? double{e} : 0.0;
    });
  }
  if (params.top_p >= 1) return cut;
  const Cut by_count = cut;
  const double share = double{params.top_p} * sum;
  const auto kept = [&](int64_t v) {
    const float e = row.weight(v);
    return by_count.keeps(e, v) ? double{e} : 0.0;
  };
  cut.weight = weight_reaching(row, kept, share);
  if (cut.weight == 0.0f) return by_count;
  const float bound = cut.weight;
  const double before =
      total_of(row, [&](int64_t v) { return row.weight(v) > bound ? kept(v) : 0.0; });
  const double equal = fmax(1.0, ceil((share - before) / double{cut.weight}));
  cut.id = id_of_equal(row, cut.weight, equal);
  if (cut.weight == by_count.weight) cut.id = min(cut.id, by_count.id);
  return cut;
}

// Parameters come as an argument of a kernel: a copy from the host would cost more than the rest.
constexpr int kParamChunk = 128;
struct ParamChunk {
  ops::SampleParams rows[kParamChunk];
};
__global__ void params_kernel(const __grid_constant__ ParamChunk chunk, ops::SampleParams* to,
                              int count) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < count) to[row] = chunk.rows[row];
}

struct Draw {
  const float* logits;
  int64_t stride;
  Segments segments;
  const ops::SampleParams* params;
  int32_t* ids;
  float *log_probs, *kept_log_probs;  // the last may be null
  int64_t n;
};

__device__ bool is_filtered(const ops::SampleParams& params, int64_t n) {
  return params.temperature != 0 &&
         (params.top_p < 1 || params.min_p > 0 || (params.top_k > 0 && params.top_k < n));
}

__device__ double unit_of(uint32_t random) { return static_cast<float>(random >> 8) * 0x1p-24f; }

// The first segment that holds the largest logit.
__device__ int segment_of_largest(const Segments& segments, const SegmentStats* stats,
                                  float largest) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = 0; base < segments.count; base += 32) {
    const bool has = base + lane < segments.count && stats[base + lane].largest == largest;
    const unsigned found = __ballot_sync(kAllLanes, has);
    if (found != 0) return base + __ffs(found) - 1;
  }
  return 0;
}

// Sums of this and the lanes before it.
__device__ double warp_prefix(double value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

struct Place {
  int segment;
  double target;  // what the cumulated e of the segment must exceed
};

// The first segment up to which the cumulated sum exceeds `target`, the last that holds anything
// where rounding leaves none. A warp works, and all its lanes receive the result.
__device__ Place segment_beyond(const Segments& segments, const SegmentStats* stats,
                                float temperature, float maximum, double target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double before = 0;
  int last = 0;
  for (int base = 0; base < segments.count; base += 32) {
    double factor = 1, sum = 0;
    if (base + lane < segments.count) {
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
__global__ void __launch_bounds__(kSegmentThreads) draw_kernel(const Draw draw) {
  const int64_t row = blockIdx.x;
  const ops::SampleParams params = draw.params[row];
  const bool greedy = params.temperature == 0;
  const float temperature = greedy ? 1.0f : params.temperature;
  const float* logits = draw.logits + row * draw.stride;
  const SegmentStats* segments = draw.segments.stats + row * draw.segments.count;
  __shared__ RowStats shared_stats;
  __shared__ Place shared_place;
  if (threadIdx.x < 32) {
    const RowStats stats = fold_segments(segments, draw.segments.count, temperature);
    const Place place = greedy || !isfinite(stats.sum)
                            ? Place{segment_of_largest(draw.segments, segments, stats.largest), 0}
                            : segment_beyond(draw.segments, segments, temperature, stats.maximum,
                                             unit_of(params.random) * stats.sum);
    if (threadIdx.x == 0) shared_stats = stats, shared_place = place;
  }
  __syncthreads();
  const RowStats stats = shared_stats;
  const Place place = shared_place;
  const bool is_finite = isfinite(stats.sum);
  if (is_finite && is_filtered(params, draw.n)) return;
  const int begin = place.segment * kSegmentColumns;
  const int end = min(begin + kSegmentColumns, static_cast<int>(draw.n));
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

__global__ void __launch_bounds__(kRowThreads) draw_filtered_kernel(const Draw draw) {
  const int64_t row_index = blockIdx.x;
  const ops::SampleParams params = draw.params[row_index];
  if (!is_filtered(params, draw.n)) return;
  const float temperature = params.temperature;
  const float* logits = draw.logits + row_index * draw.stride;
  const RowStats stats = fold_segments(draw.segments.stats + row_index * draw.segments.count,
                                       draw.segments.count, temperature);
  if (!isfinite(stats.sum)) return;
  const Row row{logits, draw.n, temperature, stats.maximum};
  Cut cut{params.min_p, draw.n - 1};
  if (params.top_p < 1 || (params.top_k > 0 && params.top_k < draw.n)) {
    const Cut last = last_kept(row, stats.sum, params);
    if (last.weight >= cut.weight) cut = last;
  }
  double kept_sum = 1;
  const int64_t id = first_beyond(
      draw.n,
      [&](int64_t v) {
        const float e = row.weight(v);
        return cut.keeps(e, v) ? double{e} : 0.0;
      },
      unit_of(params.random), nan(""), &kept_sum);
  if (threadIdx.x != 0) return;
  const float logit = logits[id];
  draw.ids[row_index] = static_cast<int32_t>(id);
  draw.log_probs[row_index] = log_prob_of(stats, logit, temperature);
  if (draw.kept_log_probs != nullptr) {
    draw.kept_log_probs[row_index] =
        static_cast<float>(double{distance_of(logit, temperature, stats.maximum)} - log(kept_sum));
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
  bool any_filtered = false;
  for (const ops::SampleParams& params : args.params) {
    any_filtered |= params.top_p < 1 || params.min_p > 0 || params.top_k > 0;
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
  if (rows == 0) return;
  auto* params = context.scratch<ops::SampleParams>(kScratchSampling, rows);
  for (int64_t first = 0; first < rows; first += kParamChunk) {
    const int64_t count = std::min<int64_t>(rows - first, kParamChunk);
    ParamChunk chunk;
    std::copy_n(args.params.begin() + first, count, chunk.rows);
    params_kernel<<<1, kParamChunk, 0, context.stream()>>>(chunk, params + first,
                                                           static_cast<int>(count));
  }
  const Segments segments = segment_stats(context, args.logits, args.num_known, {0, params}, false);
  const Draw draw{.logits = args.logits.as<float>(),
                  .stride = args.logits.row_stride,
                  .segments = segments,
                  .params = params,
                  .ids = args.ids.as<int32_t>(),
                  .log_probs = args.log_probs.as<float>(),
                  .kept_log_probs = args.kept_log_probs.as<float>(),
                  .n = args.num_known};
  const auto blocks = static_cast<unsigned>(rows);
  draw_kernel<<<blocks, kSegmentThreads, 0, context.stream()>>>(draw);
  check_launch(kOp);
  if (!any_filtered) return;
  draw_filtered_kernel<<<blocks, kRowThreads, 0, context.stream()>>>(draw);
  check_launch(kOp);
}

}  // namespace octet::cuda
