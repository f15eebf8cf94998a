// Sampling: kept sets by hand, closed forms, frequencies, greedy ties, unknown ids, bytes of the
// log-probability.
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "parity/ops/op_test.h"

namespace octet::parity {
namespace {

struct Sampled {
  std::vector<int32_t> ids;
  std::vector<double> log_probs, kept_log_probs;
};

Sampled sample(ops::Backend& backend, const TensorView& logits,
               const std::vector<ops::SampleParams>& params, int64_t num_known) {
  const auto rows = static_cast<int64_t>(params.size());
  const Array ids(std::vector<int32_t>(static_cast<size_t>(rows), -9));
  const Array log_probs = random_array(DType::kF32, Shape{rows}, 9);
  const Array kept(DType::kF32, Shape{rows});
  backend.sample({.logits = logits,
                  .params = params,
                  .ids = ids,
                  .log_probs = log_probs,
                  .kept_log_probs = kept,
                  .num_known = num_known});
  Sampled result{{}, log_probs.values(), kept.values()};
  for (const double id : ids.values()) result.ids.push_back(static_cast<int32_t>(id));
  return result;
}

uint32_t random_word(uint32_t index) {
  return random_words({.seed = 3}, RngUse::kSample, index)[0];
}

class SampleTest : public OpTest {
 protected:
  // Logits whose softmax is proportional to `weights`.
  static Array logits_of(const std::vector<double>& weights, int64_t rows = 1) {
    Array logits(DType::kF32, Shape{rows, static_cast<int64_t>(weights.size())});
    for (int64_t i = 0; i < logits.view().num_elements(); ++i) {
      logits.set(i, std::log(weights[static_cast<size_t>(i) % weights.size()]));
    }
    return logits;
  }

  // Every id drawn over an even sweep of the random word, with its kept log-probability.
  std::map<int32_t, double> kept_set(const std::vector<double>& weights, ops::SampleParams params) {
    constexpr int64_t kDraws = 2048;
    const Array logits = logits_of(weights, kDraws);
    std::vector<ops::SampleParams> rows(kDraws, params);
    for (size_t i = 0; i < rows.size(); ++i) rows[i].random = static_cast<uint32_t>(i << 21);
    const Sampled s = sample(*backend_, logits, rows, static_cast<int64_t>(weights.size()));
    std::map<int32_t, double> kept;
    std::map<int32_t, int> counts;
    for (size_t i = 0; i < rows.size(); ++i) {
      kept[s.ids[i]] = std::exp(s.kept_log_probs[i]);
      ++counts[s.ids[i]];
      EXPECT_LE(s.ids[i == 0 ? 0 : i - 1], s.ids[i]) << "drawn in order of id";
    }
    // An even sweep hits each id in proportion, within one draw.
    for (const auto& [id, p] : kept) EXPECT_NEAR(counts[id], p * kDraws, 1.01) << id;
    return kept;
  }

  static void expect_kept(const std::map<int32_t, double>& actual,
                          const std::map<int32_t, double>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [id, p] : expected) {
      ASSERT_TRUE(actual.contains(id)) << id;
      EXPECT_NEAR(actual.at(id), p, 1e-6) << id;
    }
  }
};

TEST_P(SampleTest, KeptSetsByHand) {
  const std::vector<double> w = {0.1, 0.4, 0.05, 0.25, 0.2};
  expect_kept(kept_set(w, {}), {{0, 0.1}, {1, 0.4}, {2, 0.05}, {3, 0.25}, {4, 0.2}});
  expect_kept(kept_set(w, {.top_k = 2}), {{1, 0.4 / 0.65}, {3, 0.25 / 0.65}});
  expect_kept(kept_set(w, {.top_k = 1}), {{1, 1.0}});
  expect_kept(kept_set(w, {.top_k = 9}), {{0, 0.1}, {1, 0.4}, {2, 0.05}, {3, 0.25}, {4, 0.2}});
  // 0.4 + 0.25 = 0.65 falls short of 0.7, with 0.2 it reaches.
  expect_kept(kept_set(w, {.top_p = 0.7f}), {{1, 0.4 / 0.85}, {3, 0.25 / 0.85}, {4, 0.2 / 0.85}});
  expect_kept(kept_set(w, {.top_p = 0.64f}), {{1, 0.4 / 0.65}, {3, 0.25 / 0.65}});
  expect_kept(kept_set(w, {.top_p = 1e-6f}), {{1, 1.0}});
  // The share is of what top_k kept: 0.4 / 0.85 = 0.47, with 0.25 it is 0.76.
  expect_kept(kept_set(w, {.top_p = 0.75f, .top_k = 3}), {{1, 0.4 / 0.65}, {3, 0.25 / 0.65}});
  expect_kept(kept_set(w, {.min_p = 0.45f}), {{1, 0.4 / 0.85}, {3, 0.25 / 0.85}, {4, 0.2 / 0.85}});
  expect_kept(kept_set(w, {.min_p = 1.0f}), {{1, 1.0}});
  expect_kept(kept_set(w, {.min_p = 0.6f, .top_k = 3}), {{1, 0.4 / 0.65}, {3, 0.25 / 0.65}});
  // Equal probabilities count by id.
  expect_kept(kept_set({0.2, 0.3, 0.3, 0.2}, {.top_k = 3}), {{0, 0.25}, {1, 0.375}, {2, 0.375}});
  expect_kept(kept_set({1, 1, 1, 1}, {.top_p = 0.45f}), {{0, 0.5}, {1, 0.5}});
  // Temperature comes first: squared weights at 1/2.
  expect_kept(kept_set({1, 2, 3}, {.temperature = 0.5f, .top_k = 2}),
              {{1, 4.0 / 13}, {2, 9.0 / 13}});
}

TEST_P(SampleTest, ThreeTokensInClosedForm) {
  // Cumulated 0.2, 0.5, 1: u just below and above each bound.
  const Array logits = logits_of({0.2, 0.3, 0.5});
  const auto draw = [&](double u) {
    ops::SampleParams params;
    params.random = static_cast<uint32_t>(u * 0x1p32);
    return sample(*backend_, logits, {params}, 3).ids[0];
  };
  EXPECT_EQ(draw(0), 0);
  EXPECT_EQ(draw(0.19999), 0);
  EXPECT_EQ(draw(0.20001), 1);
  EXPECT_EQ(draw(0.49999), 1);
  EXPECT_EQ(draw(0.50001), 2);
  EXPECT_EQ(draw(0.9999999), 2);
}

// A statistic of n draws over k cells has mean k − 1 and variance 2 (k − 1): six deviations.
TEST_P(SampleTest, FrequenciesFollowProbabilities) {
  constexpr int64_t kDraws = 20000;
  for (const int64_t columns : {20, 1500}) {
    std::vector<double> weights;
    double sum = 0;
    for (const double x : normal_values(columns, 5)) sum += weights.emplace_back(std::exp(x));
    const Array row = logits_of(weights);
    std::vector<double> counts(weights.size());
    for (int64_t i = 0; i < kDraws; ++i) {
      ops::SampleParams params;
      params.random = random_word(static_cast<uint32_t>(i));
      ++counts[static_cast<size_t>(sample(*backend_, row, {params}, columns).ids[0])];
    }
    double statistic = 0;
    for (size_t v = 0; v < weights.size(); ++v) {
      const double expected = kDraws * weights[v] / sum;
      statistic += (counts[v] - expected) * (counts[v] - expected) / expected;
    }
    const double cells = static_cast<double>(columns) - 1;
    EXPECT_LT(std::fabs(statistic - cells), 6 * std::sqrt(2 * cells)) << columns;
  }
}

TEST_P(SampleTest, GreedyTakesTheFirstOfEquals) {
  const Array logits(DType::kF32, Shape{3, 5},
                     {1, 7, 7, 2, 100, -3, -3, -3, -3, 100, -5, -4, -1, -1, 100});
  const Sampled s = sample(*backend_, logits,
                           std::vector<ops::SampleParams>(3, {.temperature = 0, .random = ~0u}), 4);
  EXPECT_EQ(s.ids, (std::vector<int32_t>{1, 0, 2}));
  EXPECT_NEAR(s.log_probs[1], -std::log(4.0), 1e-6);
  EXPECT_EQ(s.kept_log_probs, (std::vector<double>{0, 0, 0}));
}

TEST_P(SampleTest, UnknownIdsAreNeverSampled) {
  constexpr int64_t kColumns = 40, kKnown = 33, kDraws = 500;
  Array logits = random_array(DType::kF32, Shape{kDraws, kColumns}, 1);
  for (int64_t c = 0; c < kDraws; ++c) {
    for (int64_t v = kKnown; v < kColumns; ++v) logits.set(c * kColumns + v, 30);
  }
  for (const ops::SampleParams& rule :
       {ops::SampleParams{}, {.temperature = 0}, {.top_p = 0.9f}, {.min_p = 0.1f}, {.top_k = 5}}) {
    std::vector<ops::SampleParams> params(kDraws, rule);
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].random = i == 0 ? ~0u : random_word(static_cast<uint32_t>(i));
    }
    const Sampled s = sample(*backend_, logits, params, kKnown);
    for (const int32_t id : s.ids) EXPECT_LT(id, kKnown);
  }
}

// The recorded log-probability has the bytes of log_probs, whatever was filtered, in any batch and
// on any number of threads.
TEST_P(SampleTest, LogProbsAreTheScoredOnes) {
  constexpr int64_t kRows = 24, kColumns = 9000, kKnown = 8990;
  const Array logits = random_array(DType::kF32, Shape{kRows, kColumns}, 1, 3);
  for (const float temperature : {0.0f, 1.0f, 0.7f}) {
    std::vector<ops::SampleParams> params;
    for (uint32_t c = 0; c < kRows; ++c) {
      params.push_back({.temperature = temperature,
                        .top_p = c % 3 == 1 ? 0.8f : 1.0f,
                        .min_p = c % 4 == 2 ? 0.05f : 0.0f,
                        .top_k = c % 5 == 3 ? 40 : 0,
                        .random = random_word(c)});
    }
    const Sampled s = sample(*make_backend(2), logits, params, kKnown);
    const Array scored(DType::kF32, Shape{kRows});
    backend_->log_probs({.logits = logits,
                         .targets = Array(s.ids),
                         .log_probs = scored,
                         .entropy = {},
                         .temperature = temperature == 0 ? 1.0f : temperature,
                         .num_known = kKnown});
    EXPECT_EQ(scored.values(), s.log_probs);
    for (int64_t c = 0; c < kRows; ++c) {
      const auto row = static_cast<size_t>(c);
      const Sampled alone =
          sample(*backend_, logits.view().slice_rows(c, 1), {params[row]}, kKnown);
      EXPECT_EQ(alone.ids[0], s.ids[row]);
      EXPECT_EQ(alone.log_probs[0], s.log_probs[row]);
      EXPECT_EQ(alone.kept_log_probs[0], s.kept_log_probs[row]);
      EXPECT_GE(s.kept_log_probs[row], s.log_probs[row]);
    }
  }
}

// top_k and top_p over a wide vocabulary with many equals, against sorting all of it.
TEST_P(SampleTest, ManyIdsKeepTheSmallestSet) {
  constexpr int64_t kColumns = 3000, kDraws = 2000;
  Array logits(DType::kF32, Shape{kDraws, kColumns});
  const std::vector<double> values = normal_values(kColumns, 8, 2);
  for (int64_t i = 0; i < kDraws * kColumns; ++i) {
    logits.set(i, std::round(16 * values[static_cast<size_t>(i % kColumns)]) / 16);
  }
  for (const ops::SampleParams& rule : {ops::SampleParams{.top_p = 0.3f},
                                        {.top_p = 0.9f},
                                        {.top_p = 0.999f},
                                        {.top_k = 7},
                                        {.top_k = 100},
                                        {.top_k = 2500},
                                        {.top_p = 0.5f, .top_k = 300}}) {
    std::vector<std::pair<double, int32_t>> order;
    for (int32_t v = 0; v < kColumns; ++v) order.emplace_back(-std::exp(logits.get(v)), v);
    std::sort(order.begin(), order.end());
    if (rule.top_k > 0) order.resize(static_cast<size_t>(rule.top_k));
    double sum = 0, share = 0;
    for (const auto& [weight, id] : order) sum -= weight;
    std::set<int32_t> expected;
    for (const auto& [weight, id] : order) {
      if (rule.top_p < 1 && share >= rule.top_p * sum) break;
      share -= weight;
      expected.insert(id);
    }
    std::vector<ops::SampleParams> params(kDraws, rule);
    for (uint32_t i = 0; i < kDraws; ++i) params[i].random = random_word(i);
    const Sampled s = sample(*backend_, logits, params, kColumns);
    for (size_t i = 0; i < s.ids.size(); ++i) {
      EXPECT_TRUE(expected.contains(s.ids[i])) << s.ids[i];
      EXPECT_NEAR(s.kept_log_probs[i], logits.get(s.ids[i]) - std::log(share), 1e-5);
    }
  }
}

TEST_P(SampleTest, HostileLogitsGiveAKnownId) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  const std::vector<std::vector<double>> rows = {{nan, nan, nan, nan},
                                                 {0, nan, 5, 1},
                                                 {-kInfinity, -kInfinity, -kInfinity, -kInfinity},
                                                 {0, kInfinity, 1, kInfinity},
                                                 {-kInfinity, -1e38, -kInfinity, -kInfinity},
                                                 {3e38, -3e38, 0, 1}};
  const std::vector<int32_t> best = {0, 2, 0, 1, 1, 0};
  for (size_t r = 0; r < rows.size(); ++r) {
    const Array logits(DType::kF32, Shape{1, 4}, rows[r]);
    for (const ops::SampleParams& params : {ops::SampleParams{.random = ~0u},
                                            {.temperature = 0},
                                            {.top_p = 0.9f, .random = ~0u},
                                            {.min_p = 0.1f},
                                            {.top_k = 2}}) {
      const Sampled s = sample(*backend_, logits, {params}, 4);
      EXPECT_EQ(s.ids[0], best[r]) << r;
      EXPECT_EQ(std::isnan(s.log_probs[0]), r < 4) << r;
    }
  }
}

TEST_P(SampleTest, BadParametersAreRefused) {
  const Array logits(DType::kF32, Shape{1, 4});
  for (const ops::SampleParams& params : {ops::SampleParams{.temperature = -1},
                                          {.temperature = std::nanf("")},
                                          {.top_p = 0},
                                          {.top_p = std::nanf("")},
                                          {.min_p = -0.1f},
                                          {.min_p = 1.1f},
                                          {.top_k = -1}}) {
    EXPECT_THROW(sample(*backend_, logits, {params}, 4), Error);
  }
  EXPECT_THROW(sample(*backend_, logits, {{}, {}}, 4), Error);
  EXPECT_THROW(sample(*backend_, logits, {{}}, 5), Error);
}

INSTANTIATE_TEST_SUITE_P(Isas, SampleTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
