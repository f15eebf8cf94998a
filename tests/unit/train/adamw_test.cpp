// The optimiser against a computation by hand, and the schedules.
#include "train/adamw.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "base/error.h"
#include "support/tiny_policy.h"
#include "train/learning_rate.h"

namespace octet::train {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

std::vector<float> gradient_of(const model::Parameter& p, uint32_t salt, float size = 1.0f) {
  std::vector<float> values(static_cast<size_t>(p.shape.num_elements()));
  RandomSequence random({.seed = 31, .step = salt}, RngUse::kTask);
  for (float& v : values) v = size * (random.next_unit() - 0.5f);
  return values;
}

double norm_of(TinyPolicy& p) {
  double sum = 0;
  for (const model::Parameter& parameter : p.model.weights().parameters()) {
    for (const float g : test::floats_of(*p.backend, parameter.gradient)) {
      sum += static_cast<double>(g) * g;
    }
  }
  return std::sqrt(sum);
}

std::vector<std::vector<uint8_t>> state_bytes(TinyPolicy& p, AdamW& optimizer) {
  auto all = test::weight_bytes(p);
  for (const AdamW::Slot& slot : optimizer.slots()) {
    all.push_back(test::bytes_of(*p.backend, slot.first_moment));
    all.push_back(test::bytes_of(*p.backend, slot.second_moment));
  }
  return all;
}

void fill_gradients(TinyPolicy& p, uint32_t step, float size = 1.0f) {
  uint32_t index = 0;
  for (model::Parameter& parameter : p.model.weights().parameters()) {
    p.backend->upload(gradient_of(parameter, 100 * step + index++, size).data(),
                      parameter.gradient);
  }
}

TinyOptions options() {
  TinyOptions o;
  o.bias = o.qk_norm = true;
  o.layers = 1;
  return o;
}

// Decoupled decay (of matrices alone), bias correction, clipping by the global norm.
void check_by_hand(double max_grad_norm, double weight_decay) {
  TinyPolicy p(options());
  AdamWOptions o;
  o.beta1 = 0.8;
  o.beta2 = 0.95;
  o.epsilon = 1e-6;
  o.weight_decay = weight_decay;
  o.max_grad_norm = max_grad_norm;
  AdamW optimizer(p.backend->allocator(), p.model.weights(), o);
  struct Reference {
    std::vector<double> w, m, v;
  };
  std::vector<Reference> references;
  for (const model::Parameter& parameter : p.model.weights().parameters()) {
    const auto values = test::floats_of(*p.backend, parameter.master);
    Reference& r = references.emplace_back();
    r.w.assign(values.begin(), values.end());
    r.m.assign(values.size(), 0.0);
    r.v = r.m;
  }
  for (uint32_t step = 1; step <= 3; ++step) {
    const double rate = 0.01 * step;
    fill_gradients(p, step);
    const double norm = norm_of(p);
    const UpdateResult result = optimizer.step(*p.backend, rate);
    ASSERT_TRUE(result.applied);
    EXPECT_NEAR(result.grad_norm, norm, 1e-9 * norm);
    EXPECT_EQ(optimizer.num_steps(), step);
    const double scale = max_grad_norm > 0 ? std::min(1.0, max_grad_norm / (norm + 1e-6)) : 1.0;
    size_t index = 0;
    for (const model::Parameter& parameter : p.model.weights().parameters()) {
      Reference& r = references[index];
      const auto gradient = gradient_of(parameter, 100 * step + static_cast<uint32_t>(index));
      const auto values = test::floats_of(*p.backend, parameter.master);
      const double decay = parameter.shape.rank() == 2 ? weight_decay : 0.0;
      for (size_t i = 0; i < values.size(); ++i) {
        const double g = scale * gradient[i];
        r.w[i] -= rate * decay * r.w[i];
        r.m[i] = 0.8 * r.m[i] + 0.2 * g;
        r.v[i] = 0.95 * r.v[i] + 0.05 * g * g;
        r.w[i] -= rate * (r.m[i] / (1 - std::pow(0.8, step))) /
                  (std::sqrt(r.v[i] / (1 - std::pow(0.95, step))) + 1e-6);
        ASSERT_NEAR(values[i], r.w[i], 2e-6) << parameter.name << ", step " << step;
      }
      ++index;
    }
  }
}

TEST(AdamW, ByHand) { check_by_hand(0, 0); }
TEST(AdamW, ByHandWithDecayAndClipping) { check_by_hand(1.5, 0.1); }
TEST(AdamW, ByHandBelowTheNormThatClips) { check_by_hand(1e6, 0.1); }

TEST(AdamW, ANonFiniteGradientLeavesNoTrace) {
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    TinyOptions o = options();
    o.precision.flow = model::Flow::kFp8Full;
    TinyPolicy p(o);
    AdamW optimizer(p.backend->allocator(), p.model.weights(), {});
    fill_gradients(p, 1);
    ASSERT_TRUE(optimizer.step(*p.backend, 0.01).applied);
    const auto before = state_bytes(p, optimizer);
    fill_gradients(p, 2);
    model::Parameter& last = p.model.weights().parameters().back();
    std::vector<float> gradient = gradient_of(last, 7);
    gradient[3] = gradient[11] = bad;
    p.backend->upload(gradient.data(), last.gradient);
    const UpdateResult result = optimizer.step(*p.backend, 0.01);
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.non_finite, 2);
    EXPECT_TRUE(std::isnan(result.grad_norm));
    EXPECT_EQ(optimizer.num_steps(), 1);
    EXPECT_EQ(p.model.weights().policy_version(), 1);
    EXPECT_TRUE(state_bytes(p, optimizer) == before);
  }
}

// A finite gradient whose square F32 cannot hold would make the second moment infinite for good.
TEST(AdamW, AGradientThatOverflowsTheSecondMomentIsRefusedUnlessClipped) {
  for (const bool clipped : {false, true}) {
    TinyPolicy p(options());
    AdamWOptions o;
    o.max_grad_norm = clipped ? 1.0 : 0.0;
    AdamW optimizer(p.backend->allocator(), p.model.weights(), o);
    fill_gradients(p, 1, 1e25f);
    const auto before = state_bytes(p, optimizer);
    EXPECT_EQ(optimizer.step(*p.backend, 0.01).applied, clipped);
    EXPECT_EQ(state_bytes(p, optimizer) == before, !clipped);
    for (const AdamW::Slot& slot : optimizer.slots()) {
      EXPECT_EQ(p.backend->squared_norm(slot.second_moment).non_finite, 0);
      EXPECT_EQ(p.backend->squared_norm(slot.parameter->master).non_finite, 0);
    }
  }
}

TEST(AdamW, TrainsOnlyTheAdaptersUnderLora) {
  TinyOptions o = options();
  o.training = model::Training::kLora;
  o.lora_rank = 3;
  o.precision.flow = model::Flow::kFp8Lora;
  TinyPolicy p(o);
  AdamW optimizer(p.backend->allocator(), p.model.weights(), {});
  EXPECT_EQ(optimizer.slots().size(), 14u);
  for (const AdamW::Slot& slot : optimizer.slots()) {
    EXPECT_EQ(slot.parameter->kind, model::ParameterKind::kLora);
    std::vector<float> gradient(static_cast<size_t>(slot.parameter->shape.num_elements()), 1.0f);
    p.backend->upload(gradient.data(), slot.parameter->gradient);
  }
  const auto before = test::weight_bytes(p);
  ASSERT_TRUE(optimizer.step(*p.backend, 0.1).applied);
  const auto after = test::weight_bytes(p);
  size_t index = 0;
  for (const model::Parameter& parameter : p.model.weights().parameters()) {
    for (int form = 0; form < 4; ++form, ++index) {
      const bool moves = parameter.trained && !before[index].empty();
      EXPECT_EQ(before[index] != after[index], moves) << parameter.name;
    }
  }
}

TEST(LearningRate, ByHand) {
  const auto linear = [](int64_t u) { return learning_rate(Schedule::kLinear, 8.0, 4, 12, u); };
  EXPECT_EQ(linear(0), 0.0);
  EXPECT_EQ(linear(1), 2.0);
  EXPECT_EQ(linear(4), 8.0);
  EXPECT_EQ(linear(6), 6.0);
  EXPECT_EQ(linear(11), 1.0);
  EXPECT_EQ(linear(12), 0.0);
  EXPECT_EQ(linear(20), 0.0);
  EXPECT_EQ(learning_rate(Schedule::kLinear, 8.0, 0, 8, 0), 8.0);
  EXPECT_EQ(learning_rate(Schedule::kLinear, 8.0, 0, 1, 0), 8.0);
  const auto cosine = [](int64_t u) { return learning_rate(Schedule::kCosine, 8.0, 4, 12, u); };
  EXPECT_EQ(cosine(2), 4.0);
  EXPECT_EQ(cosine(4), 8.0);
  EXPECT_NEAR(cosine(6), 4.0 * (1 + std::sqrt(0.5)), 1e-12);
  EXPECT_NEAR(cosine(8), 4.0, 1e-12);
  EXPECT_NEAR(cosine(12), 0.0, 1e-12);
  EXPECT_EQ(learning_rate(Schedule::kConstant, 8.0, 4, 12, 0), 8.0);
  EXPECT_EQ(learning_rate(Schedule::kConstantWithWarmup, 8.0, 4, 12, 3), 6.0);
  EXPECT_EQ(learning_rate(Schedule::kConstantWithWarmup, 8.0, 4, 12, 11), 8.0);
  // A warm-up as long as the run, or longer, never divides by zero.
  EXPECT_EQ(learning_rate(Schedule::kLinear, 8.0, 4, 4, 3), 6.0);
  EXPECT_EQ(learning_rate(Schedule::kCosine, 8.0, 8, 4, 4), 4.0);
  EXPECT_EQ(parse_schedule("constant_with_warmup"), Schedule::kConstantWithWarmup);
  EXPECT_THROW(parse_schedule("polynomial"), UsageError);
}

}  // namespace
}  // namespace octet::train
