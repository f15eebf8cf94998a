#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/sampling.cpp"  // NOLINT
#include <cmath>
#include <limits>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/simd-inl.h"
#include "base/rng.h"
#include "tensor/codec.h"

#ifndef OCTET_CPU_ROW_STATS_
#define OCTET_CPU_ROW_STATS_
namespace octet::cpu {

// Of z = logits / temperature over the known ids, with e = exp(z − maximum).
struct RowStats {
  float maximum;    // max z
  double sum;       // Σ e
  double weighted;  // Σ e (z − maximum)
};

// dlogits = −p (dlog_prob + dentropy (log p + entropy)) / temperature, the target's 1 left out.
struct RowGradient {
  float maximum, inverse_sum, log_sum, entropy;
  float dlog_prob, dentropy, temperature;
};

}  // namespace octet::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

// The one function behind every log-probability. F32 within a block of ids, F64 across blocks, in
// order of id. `weights` [n], where not null, receives e.
RowStats row_stats(const float* logits, size_t n, float temperature, float* weights) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const size_t block = 128 * lanes;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max0 = lowest, max1 = lowest;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    max0 = hn::Max(max0, load_full(d, logits + i));
    max1 = hn::Max(max1, load_full(d, logits + i + lanes));
  }
  for (; i < n; i += lanes) {
    const auto v = load(d, logits + i, n - i);
    max0 = hn::Max(max0, hn::IfThenElse(first_lanes(d, n - i), v, lowest));
  }
  // Division is monotone, so this is the largest quotient.
  RowStats stats{max_lanes(d, hn::Max(max0, max1)) / temperature, 0, 0};

  const auto divisor = hn::Set(d, temperature);
  const auto maximum = hn::Set(d, stats.maximum);
  for (size_t begin = 0; begin < n; begin += block) {
    const size_t end = begin + block < n ? begin + block : n;
    auto sum = hn::Zero(d), weighted = hn::Zero(d);
    for (i = begin; i < end; i += lanes) {
      const size_t left = end - i;
      const auto distance = hn::Sub(hn::Div(load(d, logits + i, left), divisor), maximum);
      auto e = exp(d, distance);
      if (HWY_UNLIKELY(left < lanes)) e = hn::IfThenElseZero(first_lanes(d, left), e);
      sum = hn::Add(sum, e);
      // −∞ times 0 counts as 0.
      weighted =
          hn::Add(weighted, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(e, distance)));
      if (weights != nullptr) store(d, e, weights + i, left);
    }
    stats.sum += sum_lanes(d, sum);
    stats.weighted += sum_lanes(d, weighted);
  }
  return stats;
}

template <class T>
void gradient_row(const float* logits, size_t n, const RowGradient& g, T* dlogits) {
  const FloatTag d;
  const auto divisor = hn::Set(d, g.temperature);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t left = n - i;
    const auto distance =
        hn::Sub(hn::Div(load(d, logits + i, left), divisor), hn::Set(d, g.maximum));
    const auto p = hn::Mul(exp(d, distance), hn::Set(d, g.inverse_sum));
    const auto surprise = hn::Add(hn::Sub(distance, hn::Set(d, g.log_sum)), hn::Set(d, g.entropy));
    const auto factor = hn::MulAdd(hn::Set(d, g.dentropy), surprise, hn::Set(d, g.dlog_prob));
    const auto value = hn::Div(hn::Neg(hn::Mul(p, factor)), divisor);
    // p = 0 with log p = −∞ counts as 0.
    store(d, hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), value), dlogits + i, left);
  }
}

void gradient_row_any(tensor::DType dtype, const float* logits, size_t n, const RowGradient& g,
                      void* dlogits) {
  if (dtype == tensor::DType::kF32) {
    gradient_row(logits, n, g, static_cast<float*>(dlogits));
  } else {
    gradient_row(logits, n, g, static_cast<uint16_t*>(dlogits));
  }
}

// Σ of the weights above `least`, or with `inclusive` at least that; the others become 0.
double keep_above(float* weights, size_t n, float least, bool inclusive) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  const auto bound = hn::Set(d, least);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto w = load(d, weights + i, n - i);
    const auto mask = inclusive ? hn::Ge(w, bound) : hn::Gt(w, bound);
    const auto kept = hn::IfThenElseZero(mask, w);
    sum = hn::Add(sum, kept);
    store(d, kept, weights + i, n - i);
  }
  return sum_lanes(d, sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

void check_logits(std::string_view op, const TensorView& logits, int64_t num_known) {
  require_rank(op, "logits", logits, 2, 2);
  require_dtype(op, "logits", logits, DType::kF32);
  if (num_known < 1 || num_known > logits.shape[1]) {
    fail(op, "num_known must be in [1, {}], but is {}", logits.shape[1], num_known);
  }
}

void check_temperature(std::string_view op, float temperature) {
  if (!(temperature > 0)) fail(op, "temperature must be above 0, but is {}", temperature);
}

double entropy_of(const RowStats& stats) {
  return std::log(stats.sum) - stats.weighted / stats.sum;
}

float log_prob_of(const RowStats& stats, float logit, float temperature) {
  const float z = logit / temperature;
  return static_cast<float>(static_cast<double>(z - stats.maximum) - std::log(stats.sum));
}

// The largest number, of equals the first; NaN is passed over.
int32_t largest_id(const float* logits, int64_t n) {
  int32_t best = 0;
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t v = 0; v < n; ++v) {
    if (logits[v] > largest) {
      largest = logits[v];
      best = static_cast<int32_t>(v);
    }
  }
  return best;
}

struct Candidate {
  float weight;
  int32_t id;
};
bool comes_first(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

// Kept are the weights above `weight`, and those equal to it up to id `id`.
using Cut = Candidate;

// The last of what top_k and top_p keep, in the order of comes_first. `sum` is that of all weights,
// `all` has room for n.
Cut last_kept(const float* weights, int64_t n, double sum, const ops::SampleParams& params,
              Candidate* all) {
  const bool by_count = params.top_k > 0 && params.top_k < n;
  // Most ids are out at first sight. Of groups of ids at least top_k have a weight at least as
  // large as the top_k-th largest of the groups' maxima; and what together weighs less than 1 −
  // top_p of the sum cannot be in the smallest set.
  float least = 0;
  const int64_t group = by_count ? n / (4 * int64_t{params.top_k}) : 0;
  if (!by_count) {
    least = static_cast<float>(0.5 * (1 - double{params.top_p}) * sum / static_cast<double>(n));
  } else if (group > 1) {
    const int64_t num_groups = n / group;
    for (int64_t g = 0; g < num_groups; ++g) {
      all[g] = {*std::max_element(weights + g * group, weights + (g + 1) * group), 0};
    }
    std::nth_element(all, all + params.top_k - 1, all + num_groups, comes_first);
    least = all[params.top_k - 1].weight;
  }
  int64_t count = 0;
  for (int64_t v = 0; v < n; ++v) {
    all[count] = {weights[v], static_cast<int32_t>(v)};
    count += weights[v] >= least ? 1 : 0;
  }
  if (by_count) {
    std::nth_element(all, all + params.top_k - 1, all + count, comes_first);
    count = params.top_k;
    if (params.top_p >= 1) return all[count - 1];
    sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += all[i].weight;
  }
  // Halve [begin, end), which holds the last kept: `before` weighs less than the share, together
  // with [begin, end) it reaches it.
  const double share = params.top_p * sum;
  int64_t begin = 0, end = count;
  double before = 0;
  while (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(all + begin, all + middle, all + end, comes_first);
    double half = before;
    for (int64_t i = begin; i < middle; ++i) half += all[i].weight;
    if (half >= share) {
      end = middle;
    } else {
      before = half;
      begin = middle;
    }
  }
  return all[begin];
}

struct Draw {
  int32_t id;
  double kept_sum;
};

// Sums of blocks first, then within the block that holds the target. What is not kept becomes 0.
Draw draw_kept(Isa isa, float* weights, int64_t n, const Cut& cut, uint32_t random,
               double* block_sums) {
  constexpr int64_t kBlock = 512;
  const auto keep_above = OCTET_CPU_KERNEL(isa, keep_above);
  const int64_t last_equal = cut.id;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    const int64_t split = std::clamp(last_equal + 1, begin, end);
    double& sum = block_sums[begin / kBlock];
    sum = keep_above(weights + begin, static_cast<size_t>(split - begin), cut.weight, true) +
          keep_above(weights + split, static_cast<size_t>(end - split), cut.weight, false);
    total += sum;
  }
  const double target = unit_float(random) * total;
  double before = 0;
  int64_t block = 0;
  while ((block + 1) * kBlock < n && before + block_sums[block] <= target) {
    before += block_sums[block++];
  }
  // Rounding may leave the target just past the block's last kept id: then that one.
  int64_t id = -1;
  for (int64_t v = block * kBlock; v < std::min(n, (block + 1) * kBlock); ++v) {
    if (weights[v] == 0) continue;
    id = v;
    before += weights[v];
    if (before > target) break;
  }
  return {static_cast<int32_t>(id), total};
}

}  // namespace

void log_probs(Context& context, const ops::LogProbsArgs& args) {
  constexpr std::string_view kOp = "log_probs";
  check_logits(kOp, args.logits, args.num_known);
  check_temperature(kOp, args.temperature);
  const int64_t num_rows = args.logits.shape[0];
  if (!args.log_probs.empty()) {
    require_vector(kOp, "log_probs", args.log_probs, DType::kF32, num_rows);
    require_vector(kOp, "targets", args.targets, DType::kI32, num_rows);
  }
  if (!args.entropy.empty()) require_vector(kOp, "entropy", args.entropy, DType::kF32, num_rows);

  const auto row_stats = OCTET_CPU_KERNEL(context.isa, row_stats);
  parallel(context, num_rows, 4 * args.num_known, [&](int64_t begin, int64_t end, int) {
    for (int64_t c = begin; c < end; ++c) {
      const float* logits = args.logits.row<float>(c);
      const RowStats stats =
          row_stats(logits, static_cast<size_t>(args.num_known), args.temperature, nullptr);
      if (!args.entropy.empty()) {
        *args.entropy.row<float>(c) = static_cast<float>(entropy_of(stats));
      }
      if (args.log_probs.empty()) continue;
      const int32_t target = *args.targets.row<int32_t>(c);
      float& log_prob = *args.log_probs.row<float>(c);
      if (target == -1) {
        log_prob = 0;
      } else if (target < 0 || target >= args.num_known) {
        log_prob = -std::numeric_limits<float>::infinity();
      } else {
        log_prob = log_prob_of(stats, logits[target], args.temperature);
      }
    }
  });
}

void log_probs_backward(Context& context, const ops::LogProbsBackwardArgs& args) {
  constexpr std::string_view kOp = "log_probs_backward";
  check_logits(kOp, args.logits, args.num_known);
  check_temperature(kOp, args.temperature);
  const int64_t num_rows = args.logits.shape[0];
  require_vector(kOp, "targets", args.targets, DType::kI32, num_rows);
  require_vector(kOp, "dlog_probs", args.dlog_probs, DType::kF32, num_rows);
  if (!args.dentropy.empty()) require_vector(kOp, "dentropy", args.dentropy, DType::kF32, num_rows);
  require_shape(kOp, "dlogits", args.dlogits, args.logits.shape);
  require_float(kOp, "dlogits", args.dlogits);

  const auto row_stats = OCTET_CPU_KERNEL(context.isa, row_stats);
  const auto gradient_row = OCTET_CPU_KERNEL(context.isa, gradient_row_any);
  const auto num_known = static_cast<size_t>(args.num_known);
  const DType dtype = args.dlogits.dtype;
  const int64_t num_unknown = args.logits.shape[1] - args.num_known;
  parallel(context, num_rows, 8 * args.num_known, [&](int64_t begin, int64_t end, int) {
    for (int64_t c = begin; c < end; ++c) {
      const float* logits = args.logits.row<float>(c);
      const int32_t target = *args.targets.row<int32_t>(c);
      const RowStats stats = row_stats(logits, num_known, args.temperature, nullptr);
      const double log_sum = std::log(stats.sum);
      const double entropy = entropy_of(stats);
      const double dlog_prob = target == -1 ? 0 : *args.dlog_probs.row<float>(c);
      const double dentropy = args.dentropy.empty() ? 0 : *args.dentropy.row<float>(c);
      const bool target_known = target >= 0 && target < args.num_known;
      const double log_p =
          target_known
              ? static_cast<double>(logits[target] / args.temperature - stats.maximum) - log_sum
              : 0;
      gradient_row(dtype, logits, num_known,
                   RowGradient{.maximum = stats.maximum,
                               .inverse_sum = static_cast<float>(1 / stats.sum),
                               .log_sum = static_cast<float>(log_sum),
                               .entropy = static_cast<float>(entropy),
                               .dlog_prob = static_cast<float>(dlog_prob),
                               .dentropy = static_cast<float>(dentropy),
                               .temperature = args.temperature},
                   row_at(args.dlogits, c));
      char* out = static_cast<char*>(row_at(args.dlogits, c));
      const int64_t element_bytes = tensor::dtype_bytes(dtype);
      std::memset(out + args.num_known * element_bytes, 0,
                  static_cast<size_t>(num_unknown * element_bytes));
      if (!target_known) continue;
      // 1 − p without cancellation.
      const double p = std::exp(log_p);
      const double pull = p == 0 ? 0 : p * (log_p + entropy);
      const auto value = static_cast<float>((-dlog_prob * std::expm1(log_p) - dentropy * pull) /
                                            static_cast<double>(args.temperature));
      if (dtype == DType::kF32) {
        args.dlogits.row<float>(c)[target] = value;
      } else {
        args.dlogits.row<uint16_t>(c)[target] = tensor::encode_bf16(value);
      }
    }
  });
}

void sample(Context& context, const ops::SampleArgs& args) {
  constexpr std::string_view kOp = "sample";
  check_logits(kOp, args.logits, args.num_known);
  const int64_t num_rows = args.logits.shape[0];
  if (static_cast<int64_t>(args.params.size()) != num_rows) {
    fail(kOp, "params must have {} entries, one per row of logits, but has {}", num_rows,
         args.params.size());
  }
  for (const ops::SampleParams& params : args.params) {
    if (!(params.temperature >= 0) || std::isinf(params.temperature)) {
      fail(kOp, "temperature must be finite and at least 0, but is {}", params.temperature);
    }
    if (!(params.top_p > 0) || !(params.min_p >= 0 && params.min_p <= 1) || params.top_k < 0) {
      fail(kOp,
           "top_p must be above 0, min_p in [0, 1] and top_k at least 0, but they are {}, {}, {}",
           params.top_p, params.min_p, params.top_k);
    }
  }
  require_vector(kOp, "ids", args.ids, DType::kI32, num_rows);
  require_vector(kOp, "log_probs", args.log_probs, DType::kF32, num_rows);
  if (!args.kept_log_probs.empty()) {
    require_vector(kOp, "kept_log_probs", args.kept_log_probs, DType::kF32, num_rows);
  }

  const auto row_stats = OCTET_CPU_KERNEL(context.isa, row_stats);
  const int64_t n = args.num_known;
  parallel(context, num_rows, 6 * n, [&](int64_t begin, int64_t end, int thread) {
    auto* candidates = context.thread_scratch[static_cast<size_t>(thread)].take<Candidate>(3 * n);
    auto* block_sums = reinterpret_cast<double*>(candidates + n);
    auto* weights = reinterpret_cast<float*>(candidates + 2 * n);
    for (int64_t c = begin; c < end; ++c) {
      const float* logits = args.logits.row<float>(c);
      const ops::SampleParams& params = args.params[static_cast<size_t>(c)];
      const bool greedy = params.temperature == 0;
      const float temperature = greedy ? 1.0f : params.temperature;
      const RowStats stats =
          row_stats(logits, static_cast<size_t>(n), temperature, greedy ? nullptr : weights);
      Draw draw{0, 0};
      Cut cut{params.min_p, static_cast<int32_t>(n - 1)};
      const bool filtered = params.top_p < 1 || (params.top_k > 0 && params.top_k < n);
      if (greedy || !std::isfinite(stats.sum)) {
        draw = {largest_id(logits, n), 1};
      } else {
        if (filtered) {
          const Cut last = last_kept(weights, n, stats.sum, params, candidates);
          if (last.weight >= cut.weight) cut = last;
        }
        draw = draw_kept(context.isa, weights, n, cut, params.random, block_sums);
      }
      const float logit = logits[draw.id];
      const float log_prob = log_prob_of(stats, logit, temperature);
      *args.ids.row<int32_t>(c) = draw.id;
      *args.log_probs.row<float>(c) = log_prob;
      if (args.kept_log_probs.empty()) continue;
      float kept = 0;  // greedy keeps one id
      if (!std::isfinite(stats.sum) || (!greedy && !filtered && params.min_p == 0)) {
        kept = log_prob;
      } else if (!greedy) {
        kept = static_cast<float>(static_cast<double>(logit / temperature - stats.maximum) -
                                  std::log(draw.kept_sum));
      }
      *args.kept_log_probs.row<float>(c) = kept;
    }
  });
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
