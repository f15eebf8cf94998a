// Drawing ids from filtered rows, one block a row. The ids are never sorted: a histogram of the
// weights narrows down where top_k or top_p cuts, the few weights left in between are halved, and
// the drawn id is found by narrowing down the range of ids. Weights are summed as integers,
// exactly, so that a row's result does not depend on who adds what.
#include <cmath>

#include <climits>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/sample_filtered.h"

namespace octet::cuda {
namespace {

using Units = unsigned long long;  // counts, or sums of weights

constexpr int kRowThreads = 1024;
constexpr int kWarps = kRowThreads / 32;
constexpr int kBinsPerThread = 4, kBins = kBinsPerThread * kRowThreads;  // of a histogram
constexpr int kListed = 16 * kRowThreads;   // weights between which a cut is searched
constexpr unsigned kOneBits = 0x3F800000u;  // of the largest weight, e^0
// Bits that the first histogram's bins leave out: 128 bins to a factor of two, 32 factors of two.
constexpr int kFirstShift = 16;
constexpr int kSharedBytes = (kBins + kListed) * 4;

// Kept are the weights above the one of these bits, which order as weights do, and those equal to
// it up to id `id`.
struct Cut {
  unsigned bits;
  int id;
  __device__ bool keeps(unsigned weight, int v) const { return weight + (v <= id ? 1 : 0) > bits; }
  __device__ bool keeps(float e, int v) const { return keeps(__float_as_uint(e), v); }
};

struct Row {
  const float* logits;
  int n;
  float temperature, maximum;
  float units_per_one;  // a power of two, with which no sum over the row overflows

  __device__ float weight(int v) const {
    return expf(distance_of(logits[v], temperature, maximum));
  }
  // Rounded up, so that no weight counts for nothing.
  __device__ Units units(float e) const { return __float2ull_ru(e * units_per_one); }

  // Calls body(id, weight) for the share of thread `index` of `count` in [begin, end);
  // begin % 4 = 0.
  template <class Body>
  __device__ void for_each(int begin, int end, int index, int count, const Body& body) const {
    constexpr int kLoads = 4;
    const bool vectors = is_vector_aligned(logits);
    for (int base = begin + 4 * index; base < end; base += 4 * kLoads * count) {
      float z[kLoads][4];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        load_logits(logits, base + 4 * k * count, end, vectors, z[k]);
      }
      if (temperature != 1.0f) {
#pragma unroll
        for (auto& four : z) {
#pragma unroll
          for (float& value : four) value = scaled(value, temperature);
        }
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int v = base + 4 * k * count + j;
          if (v < end) body(v, expf(z[k][j] - maximum));
        }
      }
    }
  }
  template <class Body>
  __device__ void for_each(const Body& body) const {
    for_each(0, n, static_cast<int>(threadIdx.x), kRowThreads, body);
  }
};

struct Found {
  int id;
  Units total;  // of all values
};

// The first id, in order, whose cumulated value exceeds target_of(total). All threads return the
// same.
template <class Value, class Target>
__device__ Found first_beyond(const Row& row, const Value& value, const Target& target_of) {
  __shared__ Units parts[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int begin = 0, end = row.n;
  Units before = 0, total = 0, target = 0;
  const auto first_lane = [&](Units cumulated) {
    return __ffs(static_cast<int>(__ballot_sync(kAllLanes, before + cumulated > target))) - 1;
  };
  for (bool first = true; first || end - begin > 32; first = false) {
    const int part = (end - begin + 4 * kWarps - 1) / (4 * kWarps) * 4;
    const int from = min(begin + warp * part, end), to = min(from + part, end);
    Units sum = 0;
    row.for_each(from, to, lane, 32, [&](int v, float e) { sum += value(v, e); });
    sum = warp_reduce(sum, Sum());
    __syncthreads();
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    sum = parts[lane];
    const Units cumulated = warp_prefix(sum);
    if (first) {
      total = __shfl_sync(kAllLanes, cumulated, 31);
      target = target_of(total);
    }
    const int chosen = first_lane(cumulated);
    before += __shfl_sync(kAllLanes, cumulated - sum, chosen);
    begin = min(begin + chosen * part, end);
    end = min(begin + part, end);
  }
  const int v = begin + lane;
  const Units own = v < end ? value(v, row.weight(v)) : 0;
  return {begin + first_lane(warp_prefix(own)), total};
}

// How many of the bins, in order, lie before the one with which the cumulated amount reaches
// `least`; kBins where none does.
template <class Amount>
__device__ int bins_short_of(Units least, Units before, const Amount& amount) {
  __shared__ Units parts[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Units amounts[kBinsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    sum += amounts[i] = amount(static_cast<int>(threadIdx.x) * kBinsPerThread + i);
  }
  Units cumulated = warp_prefix(sum);
  __syncthreads();
  if (lane == 31) parts[warp] = cumulated;
  __syncthreads();
  cumulated += before - sum;
  for (int w = 0; w < warp; ++w) cumulated += parts[w];
  int count = 0;
#pragma unroll
  for (const Units one : amounts) count += (cumulated += one) < least ? 1 : 0;
  return block_sum(count);
}

// The last of what is kept of `kept` when `top` of it shall be: a count, or a share of its weight.
// It is the largest w such that the values of the weights ≥ w reach `least`, and of the weights
// equal to it those with the first ids.
template <bool kCounts>
__device__ Cut cut_at(const Row& row, const Cut& kept, double top) {
  extern __shared__ unsigned shared[];
  unsigned* bins = shared;
  unsigned* list = shared + kBins;
  __shared__ int num_listed;
  const int thread = static_cast<int>(threadIdx.x);
  const auto value = [&](float e) { return kCounts ? Units{1} : row.units(e); };
  const auto value_of = [&](unsigned bits) { return value(__uint_as_float(bits)); };

  // The bits of w lie in [low, high]; `above` are the values beyond.
  // All of a bin taken for its largest weight, and for its smallest, are bounds of its values.
  unsigned low = 0, high = kOneBits;
  Units least = 0, above = 0;
  int num_within = 0;
  for (int shift = kFirstShift;;) {
    for (int i = thread; i < kBins; i += kRowThreads) bins[i] = 0;
    __syncthreads();
    Units beyond = 0, within = 0;
    row.for_each([&](int v, float e) {
      const unsigned bits = __float_as_uint(e);
      if (bits < low || !kept.keeps(bits, v)) return;
      (bits > high ? beyond : within) += value(e);
      const unsigned bin = (high - bits) >> shift;
      if (bits <= high && bin < kBins) atomicAdd(&bins[bin], 1u);
    });
    above = block_sum(beyond);
    within = block_sum(within);
    if (least == 0) least = static_cast<Units>(kCounts ? top : ceil(top * double(within)));
    const auto weight_at = [&](unsigned distance) { return high - min(distance, high); };
    const int first = bins_short_of(
        least, above, [&](unsigned bin) { return bins[bin] * value_of(weight_at(bin << shift)); });
    const int last = bins_short_of(least, above, [&](unsigned bin) {
      return bins[bin] * value_of(weight_at(((bin + 1) << shift) - 1));
    });
    num_within = 0;
    for (int i = first + thread; i <= last && i < kBins; i += kRowThreads) num_within += bins[i];
    num_within = block_sum(num_within);
    if (last == kBins) num_within = INT_MAX;  // those beyond the bins were not counted

    const unsigned width = high - low, span = static_cast<unsigned>(last + 1) << shift;
    if (last < kBins && span <= width) low = high - span + 1;
    high -= static_cast<unsigned>(first) << shift;
    if (num_within <= kListed || low == high) break;
    const int covering = max(0, 32 - __clz(static_cast<int>((high - low) / kBins)));
    shift = high - low < width ? covering : shift - 1;
  }

  // What lies between is listed, and halved until one weight is left.
  const bool lists = low < high;
  if (thread == 0) num_listed = 0;
  __syncthreads();
  Units beyond = 0;
  row.for_each([&](int v, float e) {
    const unsigned bits = __float_as_uint(e);
    if (bits < low || !kept.keeps(bits, v)) return;
    if (bits > high) {
      beyond += value(e);
    } else if (lists) {
      list[atomicAdd(&num_listed, 1)] = bits;
    }
  });
  above = block_sum(beyond);
  const auto listed_values = [&](unsigned least_bits) {
    Units sum = 0;
    for (int i = thread; i < num_listed; i += kRowThreads) {
      if (list[i] >= least_bits) sum += value_of(list[i]);
    }
    return block_sum(sum);
  };
  while (low < high) {
    const unsigned middle = low + (high - low + 1) / 2;
    if (above + listed_values(middle) >= least) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }

  Units missing = least - above;
  int num_equal = num_within;
  if (lists) {
    missing -= listed_values(low + 1);
    num_equal = 0;
    for (int i = thread; i < num_listed; i += kRowThreads) num_equal += list[i] == low ? 1 : 0;
    num_equal = block_sum(num_equal);
  }
  const Units each = value_of(low), needed = (missing + each - 1) / each;
  if (needed >= num_equal) return {low, low == kept.bits ? kept.id : row.n - 1};
  const auto is_equal = [&](int v, float e) {
    return Units{__float_as_uint(e) == low && kept.keeps(e, v) ? 1u : 0u};
  };
  return {low, first_beyond(row, is_equal, [&](Units) { return needed - 1; }).id};
}

__global__ void __launch_bounds__(kRowThreads, 1)
    draw_filtered_kernel(const __grid_constant__ Draw draw,
                         const __grid_constant__ DrawRules rules) {
  await_predecessor();
  const int64_t index = blockIdx.x;
  const ops::SampleParams params = rules.rows[index];
  if (!is_filtered(params, draw.n)) return;
  const float temperature = params.temperature;
  const RowStats stats =
      fold_segments(draw.stats + index * draw.num_segments, draw.num_segments, temperature);
  if (!isfinite(stats.sum)) return;
  const Row row{.logits = draw.logits + index * draw.stride,
                .n = draw.n,
                .temperature = temperature,
                .maximum = stats.maximum,
                .units_per_one = ldexpf(1.0f, 31 + __clz(draw.n))};
  Cut cut{0, draw.n - 1};
  if (params.top_k > 0 && params.top_k < draw.n) cut = cut_at<true>(row, cut, params.top_k);
  if (params.top_p < 1) cut = cut_at<false>(row, cut, double{params.top_p});
  const unsigned least_bits = __float_as_uint(fabsf(params.min_p));  // of −0 too
  if (least_bits > cut.bits) cut = {least_bits, draw.n - 1};
  // random / 2^32 without its last 8 bits × total
  const auto [id, total] = first_beyond(
      row, [&](int v, float e) { return cut.keeps(e, v) ? row.units(e) : 0; },
      [&](Units sum) { return __umul64hi(sum, Units{params.random & 0xFFFFFF00u} << 32); });
  if (threadIdx.x != 0) return;
  const float logit = row.logits[id];
  draw.ids[index] = id;
  draw.log_probs[index] = log_prob_of(stats, logit, temperature);
  if (draw.kept_log_probs != nullptr) {
    const double kept_sum = static_cast<double>(total) / double{row.units_per_one};
    draw.kept_log_probs[index] =
        static_cast<float>(double{distance_of(logit, temperature, stats.maximum)} - log(kept_sum));
  }
}

}  // namespace

void draw_filtered(Context& context, const Draw& draw, const DrawRules& rules, int num_rows) {
  static const cudaError_t status = cudaFuncSetAttribute(
      draw_filtered_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check(status, "sample");
  launch("sample", context,
         {.grid = dim3(static_cast<unsigned>(num_rows)),
          .num_threads = kRowThreads,
          .shared_bytes = kSharedBytes},
         draw_filtered_kernel, draw, rules);
}

}  // namespace octet::cuda
