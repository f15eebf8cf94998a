// The engine's own promises: pages, weight updates, limits, ends and interrupts.
#include "rollout/engine.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/interrupt.h"
#include "loop/task.h"
#include "support/tiny_policy.h"

namespace octet::rollout {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

SamplingOptions sampling(int64_t max_new_tokens = 12) {
  SamplingOptions s;
  s.max_new_tokens = max_new_tokens;
  return s;
}

PromptRequest request(int64_t length, int64_t num_samples = 1, uint32_t prompt = 0) {
  return {test::random_ids(length, prompt), num_samples, RngKey{.seed = 9, .prompt = prompt}};
}

std::vector<int32_t> ints_of(TinyPolicy& p, const tensor::TensorView& view) {
  std::vector<int32_t> values(static_cast<size_t>(view.num_elements()));
  if (!view.empty()) p.backend->download(view, values.data());
  return values;
}

Engine engine_of(TinyPolicy& p, const EngineOptions& options = {}) {
  return Engine(*p.backend, p.decoder, p.head, p.pages, nullptr, options);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Engine, APoolPutAwayAndTakenBackChangesNoByte) {
  for (const bool fp8 : {false, true}) {
    TinyOptions o;
    o.fp8_kv = fp8;
    TinyPolicy p(o);
    Engine engine = engine_of(p);
    const std::vector<PromptRequest> prompts = {request(33, 3), request(17, 2, 1)};
    const auto before = engine.run(prompts, sampling());
    const int64_t with_pool = p.backend->allocator().bytes_in_use();
    const void* address = p.pages.layer(0).k.data;
    p.pages.unmap();
    EXPECT_LT(p.backend->allocator().bytes_in_use(), with_pool - 200 * 16 * 64 * 2);
    p.pages.map();
    EXPECT_EQ(p.backend->allocator().bytes_in_use(), with_pool);
    EXPECT_EQ(p.pages.layer(0).k.data, address);
    const auto after = engine.run(prompts, sampling());
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(after[i].ids, before[i].ids);
      test::expect_equal_bits(after[i].log_probs, before[i].log_probs, "after the pool was away");
    }
  }
}

TEST(Engine, AWeightUpdateLeavesNoStalePages) {
  for (const bool fp8 : {false, true}) {
    TinyOptions o;
    o.fp8_kv = fp8;
    if (fp8) o.precision.flow = model::Flow::kFp8Full;
    TinyPolicy warm(o);
    Engine engine = engine_of(warm);
    const PromptRequest prompt = request(33, 3);
    const auto before = engine.run({&prompt, 1}, sampling());
    EXPECT_EQ(before[0].policy_version, 0);
    for (model::Parameter& p : warm.model.weights().parameters()) {
      std::vector<float> values = test::floats_of(*warm.backend, p.master);
      for (float& value : values) value *= 1.25f;
      warm.backend->upload(values.data(), p.master);
    }
    warm.model.weights().refresh(*warm.backend);
    const auto after = engine.run({&prompt, 1}, sampling());
    EXPECT_EQ(after[0].policy_version, 1);

    TinyPolicy cold(o);
    auto from = warm.model.weights().parameters().begin();
    for (model::Parameter& p : cold.model.weights().parameters()) {
      cold.set(p, test::floats_of(*warm.backend, (from++)->master));
    }
    const auto fresh = engine_of(cold).run({&prompt, 1}, sampling());
    ASSERT_EQ(after.size(), fresh.size());
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(after[i].ids, fresh[i].ids);
      test::expect_equal_bits(after[i].log_probs, fresh[i].log_probs, "against a cold engine");
      EXPECT_NE(after[i].log_probs, before[i].log_probs);
    }
  }
}

TEST(Engine, PagesAreFreeAfterErrorsAndInterrupts) {
  TinyPolicy p{TinyOptions()};
  Engine engine = engine_of(p);
  const std::vector<PromptRequest> prompts = {request(20, 4, 0), request(31, 2, 1)};
  const auto expect_free = [&](const char* what) {
    EXPECT_EQ(p.pages.num_free(), p.pages.num_pages()) << what;
  };
  int steps = 0;
  EXPECT_THROW(engine.run(prompts, sampling(),
                          [&](int64_t, int64_t) {
                            if (++steps == 3) request_interrupt();
                          }),
               Interrupted);
  clear_interrupt();
  expect_free("interrupt");
  EXPECT_THROW(engine.run(prompts, sampling(),
                          [&](int64_t, int64_t) { throw std::runtime_error("progress"); }),
               std::runtime_error);
  expect_free("progress throws");
  EXPECT_THROW(engine.run(prompts, sampling(1), {},
                          [&](const Completion&) { throw std::runtime_error("finished"); }),
               std::runtime_error);
  expect_free("on_finished throws");
  PromptRequest bad = request(5);
  bad.ids[3] = 61;
  EXPECT_NE(error_of([&] { engine.run({&bad, 1}, sampling()); }).find("61"), std::string::npos);
  expect_free("an id beyond the model's rows");
  // And the engine still works.
  EXPECT_EQ(engine.run(prompts, sampling()).size(), 6u);
  expect_free("a run");
}

// A tokenizer that does not know an id which the model samples: the stop strings cannot be looked
// for, and whatever the group held is given back.
TEST(Engine, PagesAreFreeWhenATextCannotBeDecoded) {
  const text::Tokenizer tokenizer =
      text::Tokenizer::from_json(loop::ArithmeticTask::tokenizer_json(), "test");
  TinyPolicy p{TinyOptions()};
  Engine engine(*p.backend, p.decoder, p.head, p.pages, &tokenizer, {});
  SamplingOptions s = sampling();
  s.stop = {"=="};
  const PromptRequest prompt = request(33, 8);
  EXPECT_THROW(engine.run({&prompt, 1}, s), Error);
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

TEST(Engine, WhatCannotBeRunIsNamed) {
  TinyOptions o;
  o.num_pages = 2;
  TinyPolicy p(o);
  Engine engine = engine_of(p);
  const std::vector<PromptRequest> empty = {request(3), {{}, 1, {}}};
  EXPECT_NE(error_of([&] { engine.run(empty, sampling()); }).find("prompt 1"), std::string::npos);
  const PromptRequest full = request(64);
  EXPECT_NE(error_of([&] {
              engine.run({&full, 1}, sampling());
            }).find("max_seq_length"),
            std::string::npos);
  const PromptRequest long_one = request(30);
  EXPECT_NE(error_of([&] {
              engine.run({&long_one, 1}, sampling());
            }).find("pool's 2"),
            std::string::npos);
  EXPECT_EQ(p.pages.num_free(), 2);
  // It stops where the pool is just enough, also where only the last id tells.
  EXPECT_EQ(engine.run({&long_one, 1}, sampling(3))[0].ids.size(), 3u);
  Engine ahead = engine_of(p, {.look_ahead = true});
  const std::vector<int32_t> three = ahead.run({&long_one, 1}, sampling(3))[0].ids;
  EXPECT_EQ(three.size(), 3u);
  SamplingOptions ends = sampling();
  ends.stop_ids = {three[2]};
  ASSERT_EQ(std::ranges::count(three, three[2]), 1);
  EXPECT_EQ(ahead.run({&long_one, 1}, ends)[0].ids, three);
  SamplingOptions stop = sampling();
  stop.stop = {"a"};
  EXPECT_NE(error_of([&] {
              engine.run({&long_one, 1}, stop);
            }).find("tokenizer"),
            std::string::npos);
}

TEST(Engine, EndsAtEveryStopIdAndAtTheContext) {
  TinyPolicy p{TinyOptions()};
  Engine engine = engine_of(p);
  const PromptRequest prompt = request(10, 4);
  const auto open = engine.run({&prompt, 1}, sampling(30));
  SamplingOptions s = sampling(30);
  s.stop_ids = {open[0].ids[4], open[1].ids[6]};
  const auto stopped = engine.run({&prompt, 1}, s);
  for (size_t i = 0; i < open.size(); ++i) {
    // The same ids up to the first end token, which is the last id.
    const auto end = std::find_first_of(open[i].ids.begin(), open[i].ids.end(), s.stop_ids.begin(),
                                        s.stop_ids.end());
    const bool ends = end != open[i].ids.end();
    EXPECT_EQ(stopped[i].ids, std::vector<int32_t>(open[i].ids.begin(), ends ? end + 1 : end));
    EXPECT_EQ(stopped[i].finish_reason, ends ? FinishReason::kStop : FinishReason::kLength);
  }
  EXPECT_EQ(stopped[0].finish_reason, FinishReason::kStop);
  s.ignore_eos = true;
  EXPECT_EQ(engine.run({&prompt, 1}, s)[0].ids, open[0].ids);

  const auto cut = engine.run({&prompt, 1}, sampling(1000));
  EXPECT_EQ(cut[0].ids.size(), 64u - 10u);
  EXPECT_EQ(cut[0].finish_reason, FinishReason::kLength);
  const auto none = engine.run({&prompt, 1}, sampling(0));
  EXPECT_EQ(none.size(), 4u);
  EXPECT_TRUE(none[0].ids.empty());
}

// With a window of 8 the shared prompt of 32 tokens fills two pages exactly, and the second is the
// only one that a sample's first token still sees.
TEST(Engine, SharedPagesUnderASlidingWindow) {
  TinyOptions o;
  o.window = 8;
  TinyPolicy p(o);
  const PromptRequest prompt = request(32, 4);
  Engine engine = engine_of(p);
  const auto completions = engine.run({&prompt, 1}, sampling(16));
  EXPECT_EQ(engine.stats().num_prompt_tokens, 32);
  for (const Completion& completion : completions) {
    std::vector<int32_t> ids = prompt.ids;
    ids.insert(ids.end(), completion.ids.begin(), completion.ids.end());
    const model::ScoringRequest scoring{ids, 32};
    const auto scores =
        model::score_sequences(*p.backend, p.decoder, p.head, p.pages, {&scoring, 1}, 1.0f);
    test::expect_equal_bits(completion.log_probs, scores[0].log_probs, "window 8");
  }
  // The window is looked through: another first token changes nothing 16 layers' windows later …
  std::vector<int32_t> far = prompt.ids, near = prompt.ids;
  far[0] = (far[0] + 1) % 59;
  near[31] = (near[31] + 1) % 59;
  const auto score = [&](std::vector<int32_t> ids) {
    ids.push_back(3);
    const model::ScoringRequest scoring{ids, 32};
    return model::score_sequences(*p.backend, p.decoder, p.head, p.pages, {&scoring, 1}, 1.0f)[0]
        .log_probs[0];
  };
  EXPECT_EQ(score(far), score(prompt.ids));  // two layers see at most 14 tokens back
  EXPECT_NE(score(near), score(prompt.ids));
}

// The samples of a prompt stand side by side, and say which full pages they share.
TEST(Engine, ShowsWhatAGroupShares) {
  for (const bool look_ahead : {false, true}) {
    TinyPolicy p{TinyOptions()};
    Engine engine = engine_of(p, {.look_ahead = look_ahead});
    const std::vector<PromptRequest> prompts = {request(33, 4, 0), request(16, 3, 1),
                                                request(7, 2, 2)};
    int64_t num_checked = 0;
    const auto check = [&](int64_t, int64_t) {
      const ops::AttentionBatch& batch = p.decoder.attention_batch();
      if (batch.context_lengths.shape[0] != 9) return;
      ++num_checked;
      EXPECT_EQ(ints_of(p, batch.shared_first), std::vector<int32_t>({0, 0, 0, 0, 4, 4, 4, 7, 8}));
      EXPECT_EQ(ints_of(p, batch.shared_pages), std::vector<int32_t>({2, 2, 2, 2, 1, 1, 1, 0, 0}));
      EXPECT_EQ(batch.max_shared_pages, 2);
      // What is said to be shared is, and it is full.
      const std::vector<int32_t> table = ints_of(p, batch.page_table);
      const std::vector<int32_t> lengths = ints_of(p, batch.context_lengths);
      const auto width = static_cast<size_t>(batch.page_table.shape[1]);
      for (const size_t s : {1, 2, 3, 5, 6}) {
        const size_t count = s < 4 ? 2 : 1;
        EXPECT_TRUE(std::equal(table.begin() + s * width, table.begin() + s * width + count,
                               table.begin() + (s - 1) * width));
        EXPECT_GE(lengths[s], static_cast<int32_t>(count) * 16);
        EXPECT_NE(table[s * width + count], table[(s - 1) * width + count]);
      }
    };
    const auto completions = engine.run(prompts, sampling(6), check);
    EXPECT_EQ(completions.size(), 9u);
    // One step for each token but the first, and the last one's fetch.
    EXPECT_EQ(num_checked, look_ahead ? 6 : 5);
  }
}

// A step that was queued for a sequence that has ended leaves no trace.
TEST(Engine, AStepAheadIsDroppedWhereASequenceHasEnded) {
  TinyOptions o;
  o.num_pages = 14;
  TinyPolicy p(o);
  const std::vector<PromptRequest> prompts = {request(10, 4, 0), request(21, 4, 1)};
  Engine plain = engine_of(p, {.look_ahead = false});
  SamplingOptions s = sampling(30);
  const auto open = plain.run(prompts, s);
  s.stop_ids = {open[0].ids[4], open[5].ids[6], open[7].ids[0]};
  const EngineStats before = plain.stats();
  const auto expected = plain.run(prompts, s);
  Engine ahead = engine_of(p, {.look_ahead = true});
  std::vector<const Completion*> seen;
  int64_t last_tokens = 0;
  const auto given = ahead.run(
      prompts, s,
      [&](int64_t num_finished, int64_t tokens) {
        EXPECT_EQ(num_finished, std::ssize(seen));
        last_tokens = tokens;
      },
      [&](const Completion& c) {
        EXPECT_EQ(std::ranges::count(seen, &c), 0);
        seen.push_back(&c);
      });
  int64_t num_tokens = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_EQ(given[i].ids, expected[i].ids);
    EXPECT_EQ(given[i].finish_reason, expected[i].finish_reason);
    test::expect_equal_bits(given[i].log_probs, expected[i].log_probs, "a step ahead");
    num_tokens += std::ssize(given[i].ids);
  }
  EXPECT_EQ(seen.size(), 8u);
  EXPECT_EQ(last_tokens, num_tokens);
  EXPECT_EQ(ahead.stats().num_sampled_tokens, num_tokens);
  EXPECT_EQ(plain.stats().num_sampled_tokens - before.num_sampled_tokens, num_tokens);
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

TEST(Engine, FinishedCompletionsAreReportedOnce) {
  TinyPolicy p{TinyOptions()};
  Engine engine = engine_of(p, {.max_num_seqs = 2});
  const std::vector<PromptRequest> prompts = {request(4, 3, 0), request(7, 0, 1), request(9, 2, 2)};
  std::vector<std::pair<int64_t, int64_t>> seen;
  int64_t last_tokens = 0;
  const auto completions = engine.run(
      prompts, sampling(5), [&](int64_t, int64_t tokens) { last_tokens = tokens; },
      [&](const Completion& c) {
        EXPECT_EQ(c.ids.size(), 5u);
        seen.push_back({c.prompt, c.sample});
      });
  EXPECT_EQ(last_tokens, 25);
  EXPECT_EQ(engine.stats().num_sampled_tokens, 25);
  std::sort(seen.begin(), seen.end());
  std::vector<std::pair<int64_t, int64_t>> expected = {{0, 0}, {0, 1}, {0, 2}, {2, 0}, {2, 1}};
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(completions.size(), 5u);
}

}  // namespace
}  // namespace octet::rollout
