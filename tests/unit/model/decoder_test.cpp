// Modes of the one forward, scoring's edges, the output head and the position table.
#include <cmath>

#include <gtest/gtest.h>

#include "model/rope_table.h"
#include "support/tiny_policy.h"
#include "unit/io/test_files.h"

namespace octet::model {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

TokenScores score(TinyPolicy& p, const std::vector<int32_t>& ids, const ForwardMode& mode = {},
                  KvStore* pages = nullptr, float temperature = 1.0f) {
  const ScoringRequest request{ids, 1};
  return score_sequences(*p.backend, p.decoder, p.head, pages ? *pages : p.pages, {&request, 1},
                         temperature, mode)[0];
}

TEST(Decoder, WithoutAdaptersItIsTheBaseModel) {
  for (const Flow flow : {Flow::kBf16, Flow::kFp8Lora}) {
    TinyOptions o;
    o.training = Training::kLora;
    o.lora_rank = 4;
    o.precision.flow = flow;
    TinyOptions plain = o;
    plain.training = Training::kNone;
    plain.lora_rank = 0;
    TinyPolicy adapted(o), base(plain);
    for (Parameter& p : base.model.weights().parameters()) {
      if (p.shape.rank() == 1) {  // filled by the order of parameters, which adapters change
        std::vector<uint16_t> codes(static_cast<size_t>(p.shape.num_elements()));
        adapted.backend->download(adapted.parameter(p.name).dense, codes.data());
        base.backend->upload(codes.data(), p.dense);
      }
    }
    const std::vector<int32_t> ids = test::random_ids(21, 4);
    const auto expected = score(base, ids).log_probs;
    test::expect_equal_bits(score(adapted, ids, {.adapters = false}).log_probs, expected, "base");
    EXPECT_NE(score(adapted, ids).log_probs, expected);
  }
}

// Neighbours that begin with the same pages are a run, and share what all of them do.
TEST(Decoder, ARunSharesThePagesOfAll) {
  TinyPolicy p{TinyOptions()};
  const std::vector<int32_t> ids = test::random_ids(49, 4);
  const std::vector<std::vector<int32_t>> pages = {
      {0, 1, 2, 3}, {0, 1, 2, 4}, {0, 5, 6, 7}, {8, 9, 10, 11}, {8, 12, 13, 14}};
  // Alone each writes its own pages; together they decode one token.
  std::vector<BatchSequence> batch;
  for (const std::vector<int32_t>& own : pages) {
    p.decoder.forward(*p.backend, std::vector<BatchSequence>{{std::span(ids).first(48), 0, own}},
                      p.pages);
    batch.push_back({std::span(ids).subspan(48), 48, own});
  }
  p.decoder.forward(*p.backend, batch, p.pages);
  const ops::AttentionBatch& seen = p.decoder.attention_batch();
  const auto ints = [&](const tensor::TensorView& view) {
    std::vector<int32_t> values(static_cast<size_t>(view.num_elements()));
    p.backend->download(view, values.data());
    return values;
  };
  EXPECT_EQ(ints(seen.shared_first), std::vector<int32_t>({0, 0, 0, 3, 3}));
  EXPECT_EQ(ints(seen.shared_pages), std::vector<int32_t>({1, 1, 1, 1, 1}));
  EXPECT_EQ(seen.max_shared_pages, 1);
}

// Without training all layers share one set of scratch, whichever of them have an adapter.
TEST(Decoder, LayersMayDifferInTheirAdapters) {
  for (const bool ranks : {false, true}) {
    TinyOptions o;
    o.training = Training::kLora;
    o.lora_rank = 3;
    if (ranks) {
      o.rank_pattern = {{R"(layers\.1\..*)", 6}};
    } else {
      o.lora_pattern = R"(.*\.1\..*\.(q_proj|down_proj))";
    }
    TinyOptions frozen = o;
    frozen.training = Training::kNone;
    TinyPolicy trained(o), inference(frozen);
    const std::vector<int32_t> ids = test::random_ids(21, 4);
    const auto expected = score(trained, ids).log_probs;
    test::expect_equal_bits(score(inference, ids).log_probs, expected, "inference");
    EXPECT_NE(score(inference, ids, {.adapters = false}).log_probs, expected);
  }
}

// The BF16 reference of fp8_full reads the master: the bits of a BF16 model made from it.
TEST(Decoder, TheShadowOfFp8FullIsTheBf16Model) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    TinyOptions o;
    o.tied = o.qk_norm = true;
    o.precision.flow = Flow::kFp8Full;
    o.precision.scales = scales;
    o.fp8_kv = o.shadow = true;
    TinyPolicy fp8(o);
    KvStore dense(fp8.backend->allocator(), o.config(), tensor::DType::kBF16, 40);
    const io::TempFolder folder;
    save_weights(*fp8.backend, fp8.model, folder.path());
    TinyOptions plain;
    plain.tied = plain.qk_norm = true;
    plain.seed = 80;
    TinyPolicy bf16(plain);
    io::Checkpoint checkpoint(folder.path());
    load_weights(*bf16.backend, bf16.model, checkpoint);
    const std::vector<int32_t> ids = test::random_ids(40, 4);
    const auto expected = score(bf16, ids).log_probs;
    test::expect_equal_bits(score(fp8, ids, {.shadow = true}, &dense).log_probs, expected,
                            "shadow");
    EXPECT_NE(score(fp8, ids).log_probs, expected);
  }
}

// In fp8_lora there is no master: the reference reads the decoded codes, adapters on top.
TEST(Decoder, TheShadowOfFp8LoraReadsTheDecodedCodes) {
  TinyOptions o;
  o.training = Training::kLora;
  o.lora_rank = 4;
  o.bias = true;
  o.precision.flow = Flow::kFp8Lora;
  o.shadow = true;
  TinyPolicy fp8(o);
  TinyOptions plain = o;
  plain.precision.flow = Flow::kBf16;
  plain.shadow = false;
  TinyPolicy bf16(plain);
  for (const LinearLayer* layer : bf16.model.linear_layers()) {
    fp8.backend->dequantize({fp8.parameter(layer->weight->name).quantized, layer->weight->dense});
  }
  const std::vector<int32_t> ids = test::random_ids(40, 4);
  test::expect_equal_bits(score(fp8, ids, {.shadow = true}).log_probs, score(bf16, ids).log_probs,
                          "shadow");
}

TEST(Decoder, FlowsStayNearFloat32) {
  TinyOptions o;
  o.qk_norm = true;
  TinyOptions exact = o;
  exact.precision.float32 = true;
  TinyPolicy float32(exact);
  const std::vector<int32_t> ids = test::random_ids(40, 4);
  const auto expected = score(float32, ids).log_probs;
  const auto worst = [&](const TinyOptions& options) {
    TinyPolicy p(options);
    const auto given = score(p, ids).log_probs;
    double most = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      most = std::max(most, std::fabs(static_cast<double>(given[i]) - expected[i]));
    }
    return most;
  };
  // Logits here are a few units; BF16 rounds them by 2^-9 each time, E4M3 by some per cent.
  EXPECT_LT(worst(o), 0.1);
  o.precision.flow = Flow::kFp8Full;
  o.fp8_kv = true;
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    o.precision.scales = scales;
    EXPECT_LT(worst(o), 0.6) << weight_scales_name(scales);
  }
}

TEST(Decoder, AnIdBeyondTheModelsRowsIsNamed) {
  TinyPolicy p{TinyOptions()};
  for (const int32_t bad : {61, -1, 1 << 30}) {
    std::vector<int32_t> ids = test::random_ids(6, 1);
    ids[4] = bad;
    const std::string message = io::error_of([&] { score(p, ids); });
    io::expect_contains(message, std::to_string(bad));
    io::expect_contains(message, "position 4");
  }
  EXPECT_EQ(p.pages.num_free(), p.pages.num_pages());
}

TEST(Scoring, EdgesOfARequest) {
  TinyOptions o;
  o.num_pages = 5;
  TinyPolicy p(o);
  const std::vector<int32_t> ids = test::random_ids(33, 2);
  const auto whole = score(p, ids);
  ASSERT_EQ(whole.log_probs.size(), 32u);
  ASSERT_EQ(whole.entropies.size(), 32u);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_LE(whole.log_probs[i], 0);
    EXPECT_GT(whole.entropies[i], 0);
    EXPECT_LE(whole.entropies[i], std::log(59.0f) + 1e-5f);  // known ids only
  }
  const std::span<const int32_t> all(ids);
  const std::vector<ScoringRequest> requests = {
      {all, 30}, {all.first(1), 1}, {{}, 1}, {all.first(1), 1, true}, {all.first(17), 3, true},
      {all, 33}};
  for (const int64_t max_tokens : {0, 7, 1}) {
    const auto scores =
        score_sequences(*p.backend, p.decoder, p.head, p.pages, requests, 1.0f, {}, max_tokens);
    test::expect_equal_bits(scores[0].log_probs,
                            {whole.log_probs.begin() + 29, whole.log_probs.end()},
                            "from target 30");
    EXPECT_TRUE(scores[1].log_probs.empty() && scores[1].entropies.empty());
    EXPECT_TRUE(scores[2].log_probs.empty());
    EXPECT_TRUE(scores[3].log_probs.empty());
    test::expect_equal_bits(scores[3].entropies, {whole.entropies[0]}, "last entropy");
    EXPECT_EQ(scores[4].log_probs.size(), 14u);
    test::expect_equal_bits(scores[4].entropies,
                            {whole.entropies.begin() + 2, whole.entropies.begin() + 17}, "entropy");
    EXPECT_TRUE(scores[5].log_probs.empty());
    EXPECT_EQ(p.pages.num_free(), 5);
  }
}

TEST(Scoring, WhatDoesNotFitIsAnErrorThatKeepsNothing) {
  TinyOptions o;
  o.num_pages = 2;
  TinyPolicy p(o);
  io::expect_contains(io::error_of([&] { score(p, test::random_ids(65, 1)); }), "max_seq_length");
  io::expect_contains(io::error_of([&] { score(p, test::random_ids(40, 1)); }), "3 pages");
  EXPECT_EQ(p.pages.num_free(), 2);
  EXPECT_EQ(score(p, test::random_ids(32, 1)).log_probs.size(), 31u);
}

TEST(OutputHead, PaddedRowsOfTheVocabularyAreMasked) {
  TinyOptions o;
  o.num_known = 50;
  TinyPolicy known(o);
  // What the rows beyond hold does not matter.
  Parameter& head = known.parameter("lm_head.weight");
  std::vector<float> values = test::floats_of(*known.backend, head.master);
  const std::vector<int32_t> ids = test::random_ids(12, 2, 50);
  const auto before = score(known, ids);
  for (size_t i = 50 * 96; i < values.size(); ++i) values[i] = 3.0f;
  known.set(head, values);
  const auto after = score(known, ids);
  test::expect_equal_bits(after.log_probs, before.log_probs, "log-probs");
  test::expect_equal_bits(after.entropies, before.entropies, "entropies");
}

TEST(OutputHead, TemperatureDividesTheLogits) {
  TinyPolicy p{TinyOptions()};
  const std::vector<int32_t> ids = test::random_ids(12, 2);
  EXPECT_NE(score(p, ids, {}, nullptr, 0.6f).log_probs, score(p, ids).log_probs);
  const auto hot = score(p, ids, {}, nullptr, 1000.0f);
  for (const float log_prob : hot.log_probs) EXPECT_NEAR(log_prob, -std::log(59.0f), 0.02f);
}

TEST(KvStore, CountsReferences) {
  auto backend = cpu::make_cpu_backend({.num_threads = 1});
  KvStore store(backend->allocator(), TinyOptions().config(), tensor::DType::kE4M3, 2);
  const int32_t a = *store.allocate();
  const int32_t b = *store.allocate();
  EXPECT_NE(a, b);
  EXPECT_FALSE(store.allocate().has_value());
  store.add_reference(a);
  EXPECT_TRUE(store.is_shared(a));
  store.release(a);
  EXPECT_EQ(store.num_free(), 0);
  store.release(a);
  EXPECT_EQ(store.num_free(), 1);
  EXPECT_THROW(store.release(a), std::logic_error);
  EXPECT_EQ(*store.allocate(), a);
  EXPECT_EQ(KvStore::pages_for(0), 0);
  EXPECT_EQ(KvStore::pages_for(16), 1);
  EXPECT_EQ(KvStore::pages_for(17), 2);
}

// Positions far out and beyond the original length, against float64.
TEST(RopeTable, FarPositionsAndScalings) {
  io::RopeConfig rope;
  rope.theta = 10000.0;
  const auto table = rope_table(rope, 32, 30001);
  for (int64_t i = 0; i < 16; ++i) {
    const float frequency = static_cast<float>(std::pow(10000.0, -2.0 * i / 32));
    const double angle = 30000.0 * std::pow(10000.0, -2.0 * i / 32);
    // The frequency and the angle are float32, as the models were trained: 2^-23 of the angle.
    EXPECT_NEAR(table[30000 * 32 + i], std::cos(angle), 3e-7 * angle + 1e-6);
    EXPECT_NEAR(table[30000 * 32 + 16 + i], std::sin(angle), 3e-7 * angle + 1e-6);
    EXPECT_NEAR(rope_inverse_frequencies(rope, 32)[i], frequency, 2e-7 * frequency);
  }
  rope.type = io::RopeType::kLinear;
  rope.factor = 4.0;
  EXPECT_NEAR(rope_table(rope, 32, 9)[8 * 32], std::cos(2.0), 1e-6);

  // Llama 3.1's numbers: short waves stay, long ones are divided by 8, between them a mixture.
  rope = {io::RopeType::kLlama3, 500000.0, 8.0, 1.0, 4.0, 8192};
  io::RopeConfig plain;
  plain.theta = 500000.0;
  const auto scaled = rope_inverse_frequencies(rope, 128);
  const auto unscaled = rope_inverse_frequencies(plain, 128);
  int kept = 0, divided = 0, mixed = 0;
  for (size_t i = 0; i < scaled.size(); ++i) {
    const double wavelength = 2 * M_PI / unscaled[i];
    const double ratio = scaled[i] / unscaled[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_EQ(ratio, 1.0);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_NEAR(ratio, 1.0 / 8, 1e-6);
      ++divided;
    } else {
      const double smooth = (8192.0 / wavelength - 1) / 3;
      EXPECT_NEAR(ratio, (1 - smooth) / 8 + smooth, 1e-6);
      ++mixed;
    }
  }
  EXPECT_TRUE(kept > 20 && divided > 10 && mixed > 3) << kept << " " << divided << " " << mixed;
}

}  // namespace
}  // namespace octet::model
