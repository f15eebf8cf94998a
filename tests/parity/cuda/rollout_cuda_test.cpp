// The engine on the device: steps that are recorded, filled up and queued ahead give the bytes that
// scoring computes plainly.
#include "backend/cuda/cuda_backend.h"
#include "rollout/engine.h"
#include "support/completions.h"
#include "support/tiny_policy.h"

namespace octet::rollout {
namespace {

using model::Flow;
using model::WeightScales;
using test::TinyOptions;
using test::TinyPolicy;

class RolloutCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_none;
    for (const cuda::DeviceInfo& info : cuda::devices(why_none)) {
      if (info.usable) device_ = info.index;
    }
    if (device_ < 0) GTEST_SKIP() << "no CUDA device: " << why_none;
  }
  TinyPolicy on_device(const TinyOptions& o) {
    return TinyPolicy(o, cuda::make_cuda_backend({.device = device_}));
  }
  int device_ = -1;
};

std::vector<TinyOptions> flows() {
  std::vector<TinyOptions> all;
  for (const bool fp8_kv : {false, true}) {
    for (const int which : {0, 1, 2, 3}) {
      TinyOptions& o = all.emplace_back();
      o.hidden = 128;
      o.inner = 256;
      o.fp8_kv = fp8_kv;
      o.qk_norm = which != 0;
      o.bias = which == 0;  // steps are not filled up then
      o.max_context = 320;
      o.num_pages = 400;
      o.precision.flow = which == 0 ? Flow::kBf16 : which == 3 ? Flow::kFp8Full : Flow::kFp8Lora;
      o.precision.scales = which == 2 ? WeightScales::kChannel : WeightScales::kBlock;
      o.training = which == 1 || which == 2 ? model::Training::kLora : model::Training::kNone;
      if (which == 3) o.training = model::Training::kFull;
      if (which == 1) o.lora_rank = 8;
    }
  }
  return all;
}

std::vector<PromptRequest> requests() {
  std::vector<PromptRequest> all;
  for (const int64_t length : {1, 16, 33, 230}) {
    const auto index = static_cast<uint32_t>(all.size());
    all.push_back({test::random_ids(length, index), 3, RngKey{.seed = 5, .prompt = index}});
  }
  return all;
}

SamplingOptions sampling(bool stops) {
  SamplingOptions s;
  s.temperature = 0.7f;
  s.top_p = 0.95f;
  s.max_new_tokens = 40;
  if (stops) s.stop_ids = {7, 11};
  return s;
}

TEST_F(RolloutCuda, SampledEqualsScored) {
  for (const TinyOptions& o : flows()) {
    TinyPolicy p = on_device(o);
    const std::vector<PromptRequest> prompts = requests();
    const auto run = [&](TinyPolicy& policy, const EngineOptions& options, EngineStats& stats) {
      Engine engine(*policy.backend, policy.decoder, policy.head, policy.pages, nullptr, options);
      auto completions = engine.run(prompts, sampling(true));
      stats = engine.stats();
      EXPECT_EQ(policy.pages.num_free(), policy.pages.num_pages());
      return completions;
    };
    EngineStats stats, other;
    const auto completions = run(p, {}, stats);
    int64_t num_tokens = 0;
    std::vector<std::vector<int32_t>> ids;
    for (const Completion& c : completions) {
      num_tokens += std::ssize(c.ids);
      ids.push_back(prompts[static_cast<size_t>(c.prompt)].ids);
      ids.back().insert(ids.back().end(), c.ids.begin(), c.ids.end());
    }
    EXPECT_EQ(stats.num_sampled_tokens, num_tokens);
    std::vector<model::ScoringRequest> scoring;
    for (size_t i = 0; i < ids.size(); ++i) {
      scoring.push_back({ids[i], std::ssize(ids[i]) - std::ssize(completions[i].ids)});
    }
    const auto scores =
        model::score_sequences(*p.backend, p.decoder, p.head, p.pages, scoring, 0.7f);
    for (size_t i = 0; i < scores.size(); ++i) {
      test::expect_equal_bits(completions[i].log_probs, scores[i].log_probs, "scored");
    }
    expect_equal(run(p, {}, other), completions, "recorded before");
    expect_equal(run(p, {.look_ahead = false}, other), completions, "one step at a time");
    expect_equal(run(p, {.max_num_seqs = 3, .max_batch_tokens = 50}, other), completions, "three");
    TinyOptions short_of = o;
    short_of.num_pages = 22;  // the longest takes 17
    short_of.chunk_rows = 5;
    TinyPolicy small = on_device(short_of);
    expect_equal(run(small, {}, other), completions, "22 pages");
    EXPECT_GT(other.num_preemptions, 0);
  }
}

// What fills up a batch is not counted: as many elements as the CPU has quantised.
TEST_F(RolloutCuda, CountsWhatIsThere) {
  for (const TinyOptions& o : flows()) {
    int64_t elements[2];
    for (const bool gpu : {false, true}) {
      TinyPolicy p = gpu ? on_device(o) : TinyPolicy(o);
      Engine engine(*p.backend, p.decoder, p.head, p.pages, nullptr, {.look_ahead = false});
      p.backend->take_quantize_counters();
      engine.run(requests(), sampling(false));
      const ops::QuantizeCounters counters = p.backend->take_quantize_counters();
      EXPECT_EQ(counters.not_a_number, 0);
      elements[gpu ? 1 : 0] = counters.elements;
    }
    EXPECT_EQ(elements[0], elements[1]);
    EXPECT_EQ(elements[0] > 0, o.fp8_kv || o.precision.fp8());
  }
}

}  // namespace
}  // namespace octet::rollout
