// Drawing ids: one block a row. The ids are never sorted: where top_k and top_p cut is found by
// halving the range of weights, the drawn id by narrowing down the range of ids, both with sums in
// one fixed order.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_stats.cuh"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;

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

// The largest number, of equals the first; NaN is passed over.
__device__ int64_t largest_id(const float* logits, int64_t n) {
  __shared__ unsigned long long best;
  float largest = -INFINITY;
  for (int64_t v = threadIdx.x; v < n; v += kRowThreads) largest = fmaxf(largest, logits[v]);
  largest = block_max(largest);
  if (threadIdx.x == 0) best = static_cast<unsigned long long>(n);
  __syncthreads();
  for (int64_t v = threadIdx.x; v < n; v += kRowThreads) {
    if (logits[v] == largest) {
      atomicMin(&best, static_cast<unsigned long long>(v));
      break;
    }
  }
  __syncthreads();
  return best == static_cast<unsigned long long>(n) || largest == -INFINITY
             ? 0
             : static_cast<int64_t>(best);
}

__global__ void __launch_bounds__(kRowThreads)
    sample_kernel(const float* logits, int64_t stride, const ops::SampleParams* all_params,
                  int32_t* ids, float* log_probs, float* kept_log_probs, int64_t n) {
  const int64_t c = blockIdx.x;
  const ops::SampleParams params = all_params[c];
  const bool greedy = params.temperature == 0;
  const float temperature = greedy ? 1.0f : params.temperature;
  const float* row_logits = logits + c * stride;
  const RowStats stats = row_stats(row_logits, n, temperature);
  const Row row{row_logits, n, temperature, stats.maximum};
  const bool filtered = params.top_p < 1 || (params.top_k > 0 && params.top_k < n);
  const bool is_finite = isfinite(stats.sum);
  int64_t id = 0;
  double kept_sum = 1;
  if (greedy || !is_finite) {
    id = largest_id(row_logits, n);
  } else {
    Cut cut{params.min_p, n - 1};
    if (filtered) {
      const Cut last = last_kept(row, stats.sum, params);
      if (last.weight >= cut.weight) cut = last;
    }
    const double u = static_cast<float>(params.random >> 8) * 0x1p-24f;
    id = first_beyond(
        n,
        [&](int64_t v) {
          const float e = row.weight(v);
          return cut.keeps(e, v) ? double{e} : 0.0;
        },
        u, nan(""), &kept_sum);
  }
  if (threadIdx.x != 0) return;
  const float logit = row_logits[id];
  const float log_prob = log_prob_of(stats, logit, temperature);
  ids[c] = static_cast<int32_t>(id);
  log_probs[c] = log_prob;
  if (kept_log_probs == nullptr) return;
  float kept = 0;  // greedy keeps one id
  if (!is_finite || (!greedy && !filtered && params.min_p == 0)) {
    kept = log_prob;
  } else if (!greedy) {
    kept =
        static_cast<float>(double{distance_of(logit, temperature, stats.maximum)} - log(kept_sum));
  }
  kept_log_probs[c] = kept;
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
  if (rows == 0) return;
  auto* params = context.scratch<ops::SampleParams>(kScratchSampling, rows);
  context.upload(args.params.data(), params,
                 rows * static_cast<int64_t>(sizeof(ops::SampleParams)));
  sample_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, context.stream()>>>(
      args.logits.as<float>(), args.logits.row_stride, params, args.ids.as<int32_t>(),
      args.log_probs.as<float>(), args.kept_log_probs.as<float>(), args.num_known);
  check_launch(kOp);
}

}  // namespace octet::cuda
