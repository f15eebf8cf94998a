// Gradients of the whole model: float32 against finite differences, FP8 against float32.
#include <cmath>

#include <gtest/gtest.h>

#include "support/tiny_policy.h"

namespace octet::model {
namespace {

using test::TinyOptions;
using test::TinyPolicy;
using train::TrainSample;

constexpr float kTemperature = 0.8f;

// Sequences of one, several and more than a page of tokens, with a factor for each log-probability:
// the loss is their weighted sum.
struct Batch {
  std::vector<TrainSample> samples;
  std::vector<std::vector<float>> factors;

  explicit Batch(int64_t num_known) {
    for (const auto& [length, first] :
         {std::pair<int64_t, int64_t>{20, 6}, {2, 1}, {9, 9}, {7, 1}}) {
      TrainSample& s = samples.emplace_back();
      const auto salt = static_cast<uint32_t>(length);
      s.ids = test::random_ids(length, salt, num_known);
      s.first_target = first;
      RandomSequence random({.seed = 4, .prompt = salt}, RngUse::kTask);
      std::vector<float>& f = factors.emplace_back();
      for (int64_t t = first; t < length; ++t) f.push_back(random.next_unit() - 0.3f);
    }
  }
};

double loss_of(TinyPolicy& p, const Batch& batch) {
  std::vector<ScoringRequest> requests;
  for (const TrainSample& s : batch.samples) requests.push_back({s.ids, s.first_target});
  const auto scores =
      score_sequences(*p.backend, p.decoder, p.head, p.pages, requests, kTemperature);
  double sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    for (size_t t = 0; t < scores[i].log_probs.size(); ++t) {
      sum += static_cast<double>(batch.factors[i][t]) * scores[i].log_probs[t];
    }
  }
  return sum;
}

void add_gradients(TinyPolicy& p, const Batch& batch, size_t micro_batch) {
  for (size_t begin = 0; begin < batch.samples.size(); begin += micro_batch) {
    const size_t count = std::min(micro_batch, batch.samples.size() - begin);
    train::train_micro_batch(*p.backend, p.policy(), std::span(batch.samples).subspan(begin, count),
                             kTemperature, [&](auto, std::span<std::vector<float>> gradients) {
                               for (size_t i = 0; i < count; ++i) {
                                 gradients[i] = batch.factors[begin + i];
                               }
                               return true;
                             });
  }
}

void check_finite_differences(const TinyOptions& options) {
  TinyPolicy p(options);
  const Batch batch(options.num_known);
  add_gradients(p, batch, 4);
  int checked = 0;
  for (Parameter& parameter : p.model.weights().parameters()) {
    if (!parameter.trained) {
      EXPECT_TRUE(parameter.gradient.empty()) << parameter.name;
      continue;
    }
    const std::vector<float> gradient = test::floats_of(*p.backend, parameter.gradient);
    const std::vector<float> values = test::floats_of(*p.backend, parameter.master);
    double norm = 0;
    for (const float g : gradient) norm += static_cast<double>(g) * g;
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-3) << parameter.name;
    // Along the gradient and along random directions of unit length.
    for (uint32_t direction = 0; direction < 3; ++direction) {
      std::vector<double> d(values.size());
      RandomSequence random({.seed = 8, .prompt = direction}, RngUse::kTask);
      double length = 0;
      for (size_t i = 0; i < d.size(); ++i) {
        d[i] = direction == 0 ? gradient[i] : random.next_normal();
        length += d[i] * d[i];
      }
      double expected = 0;
      for (size_t i = 0; i < d.size(); ++i) {
        d[i] /= std::sqrt(length);
        expected += d[i] * gradient[i];
      }
      const auto loss_at = [&](double step) {
        std::vector<float> moved = values;
        for (size_t i = 0; i < d.size(); ++i) moved[i] += static_cast<float>(step * d[i]);
        p.set(parameter, moved);
        return loss_of(p, batch);
      };
      // Fourth order; the noise of float32 sums is about 1e-6 / h.
      const double h = 0.01;
      const double slope =
          (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h);
      EXPECT_NEAR(slope, expected, 1e-3 * norm + 1e-3)
          << parameter.name << ", direction " << direction;
      ++checked;
    }
    p.set(parameter, values);
  }
  EXPECT_GT(checked, 0);
}

TinyOptions small_float32() {
  TinyOptions o;
  o.precision.float32 = true;
  o.hidden = 20;
  o.heads = 6;
  o.kv_heads = 2;
  o.head_dim = 8;
  o.inner = 28;
  o.vocab = 23;
  o.num_known = 21;
  o.chunk_rows = 7;  // several chunks, with a tail
  return o;
}

TEST(Gradients, UntiedWithBiasesAndWindow) {
  TinyOptions o = small_float32();
  o.bias = true;
  o.window = 5;
  check_finite_differences(o);
}

TEST(Gradients, TiedWithNormsOfHeads) {
  TinyOptions o = small_float32();
  o.tied = o.qk_norm = true;
  check_finite_differences(o);
}

TEST(Gradients, Adapters) {
  TinyOptions o = small_float32();
  o.training = Training::kLora;
  o.lora_rank = 3;
  o.bias = o.qk_norm = true;
  check_finite_differences(o);
  // Of some layers only, each with its own rank.
  o.lora_pattern = R"(.*\.(0\..*\.(q|up)|1\..*\.(q|k|down))_proj)";
  o.rank_pattern = {{R"(1\..*\.q_proj)", 6}};
  check_finite_differences(o);
}

TEST(Gradients, DoNotDependOnMicroBatches) {
  TinyOptions o = small_float32();
  o.tied = o.qk_norm = o.bias = true;
  TinyPolicy whole(o), cut(o);
  const Batch batch(o.num_known);
  add_gradients(whole, batch, 4);
  add_gradients(cut, batch, 1);
  auto other = cut.model.weights().parameters().begin();
  for (Parameter& parameter : whole.model.weights().parameters()) {
    const auto a = test::floats_of(*whole.backend, parameter.gradient);
    const auto b = test::floats_of(*cut.backend, (other++)->gradient);
    double norm = 0, difference = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      norm += a[i] * a[i];
      difference += (a[i] - b[i]) * (a[i] - b[i]);
    }
    EXPECT_LE(std::sqrt(difference), 1e-5 * std::sqrt(norm)) << parameter.name;
  }
}

double cosine(std::span<const float> a, std::span<const float> b) {
  double aa = 0, bb = 0, ab = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    aa += static_cast<double>(a[i]) * a[i];
    bb += static_cast<double>(b[i]) * b[i];
    ab += static_cast<double>(a[i]) * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

// E4M3 keeps three mantissa bits: a code is off by up to 1/16 and by 2.6 % in the root mean square.
// A gradient passes a few quantised products, each with two rounded factors, so its relative error
// e is some 5 to 20 %, and its cosine with the exact one 1 − e²/2.
TEST(Gradients, Fp8IsNearFloat32) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    TinyOptions o;
    o.tied = o.qk_norm = o.bias = true;
    o.layers = 1;
    TinyOptions exact = o;
    exact.precision.float32 = true;
    o.precision.flow = Flow::kFp8Full;
    o.precision.scales = scales;
    o.fp8_kv = true;
    TinyPolicy fp8(o), float32(exact);
    const Batch batch(o.num_known);
    add_gradients(fp8, batch, 4);
    add_gradients(float32, batch, 4);
    auto other = float32.model.weights().parameters().begin();
    for (Parameter& parameter : fp8.model.weights().parameters()) {
      const auto a = test::floats_of(*fp8.backend, parameter.gradient);
      const auto b = test::floats_of(*float32.backend, (other++)->gradient);
      EXPECT_GT(cosine(a, b), 0.97) << parameter.name << ", " << weight_scales_name(scales);
    }
  }
}

TEST(Gradients, AdaptersNearFloat32InFp8Lora) {
  for (const bool dequantise : {false, true}) {
    TinyOptions o;
    o.training = Training::kLora;
    o.lora_rank = 4;
    o.layers = 1;
    TinyOptions exact = o;
    exact.precision.float32 = true;
    o.precision.flow = Flow::kFp8Lora;
    o.precision.dequantize_backward = dequantise;
    TinyPolicy fp8(o), float32(exact);
    const Batch batch(o.num_known);
    add_gradients(fp8, batch, 4);
    add_gradients(float32, batch, 4);
    for (const LinearLayer* layer : fp8.model.linear_layers()) {
      for (const Parameter* parameter : {layer->lora.a, layer->lora.b}) {
        const auto a = test::floats_of(*fp8.backend, parameter->gradient);
        const auto b =
            test::floats_of(*float32.backend, float32.parameter(parameter->name).gradient);
        EXPECT_GT(cosine(a, b), 0.97) << parameter->name << (dequantise ? ", bf16" : ", fp8");
      }
    }
  }
}

// B = 0 makes whole gradient rows zero: they quantise with scale 1, not 1/0.
TEST(Gradients, TheFirstStepOfAdaptersIsFinite) {
  for (const Flow flow : {Flow::kBf16, Flow::kFp8Lora}) {
    TinyOptions o;
    o.training = Training::kLora;
    o.lora_rank = 4;
    o.zero_b = true;
    o.precision.flow = flow;
    TinyPolicy p(o);
    add_gradients(p, Batch(o.num_known), 2);
    for (const LinearLayer* layer : p.model.linear_layers()) {
      for (const float g : test::floats_of(*p.backend, layer->lora.a->gradient)) ASSERT_EQ(g, 0.0f);
      double norm = 0;
      for (const float g : test::floats_of(*p.backend, layer->lora.b->gradient)) norm += g * g;
      EXPECT_TRUE(std::isfinite(norm) && norm > 0) << layer->module;
    }
  }
}

}  // namespace
}  // namespace octet::model
