// A restored run is the run that was saved, to the byte.
#include "loop/checkpoint.h"

#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "unit/io/test_files.h"
#include "unit/train/train_batch.h"

namespace octet::loop {
namespace {

using io::error_of;
using io::expect_contains;
using test::TinyOptions;
using test::TinyPolicy;

struct TinyRun {
  explicit TinyRun(const TinyOptions& o)
      : policy(o),
        shadow(policy.backend->allocator(), o.config(), tensor::DType::kBF16, 60),
        trainer(*policy.backend, policy.model, policy.policy(), &shadow, options()) {}

  static train::TrainerOptions options() {
    train::TrainerOptions o;
    o.loss.type = rl::LossType::kGrpo;
    o.mini_batches = 2;
    o.temperature = train::kTemperature;
    o.learning_rate = 5e-3;
    o.num_updates = 20;
    rl::CalibrationConfig calibration;
    calibration.interval = 1;
    calibration.min_tail = 40;  // the pool is neither empty nor full when it is saved
    o.calibration = calibration;
    return o;
  }
  rl::MetricList step(int64_t step) { return trainer.step(train::make_samples(policy), step); }
  std::vector<std::vector<uint8_t>> bytes() {
    auto all = test::weight_bytes(policy);
    for (const auto& slot : trainer.optimizer().slots()) {
      all.push_back(test::bytes_of(*policy.backend, slot.first_moment));
      all.push_back(test::bytes_of(*policy.backend, slot.second_moment));
    }
    return all;
  }

  TinyPolicy policy;
  model::KvStore shadow;
  train::Trainer trainer;
};

TinyOptions full() {
  TinyOptions o;
  o.tied = o.qk_norm = o.bias = true;
  o.precision.flow = model::Flow::kFp8Full;
  o.fp8_kv = o.shadow = true;
  return o;
}
TinyOptions lora() {
  TinyOptions o;
  o.training = model::Training::kLora;
  o.lora_rank = 3;
  o.precision.flow = model::Flow::kFp8Lora;
  o.shadow = true;
  return o;
}

TEST(Checkpoint, RestoringGivesTheBytesBackAndTheNextStepsAreEqual) {
  for (TinyOptions o : {full(), lora()}) {
    TinyRun saved(o);
    saved.step(0);
    saved.step(1);
    EXPECT_GT(saved.trainer.calibrator()->pool().num_negative, 0);
    const io::TempFolder folder, again;
    save_state(*saved.policy.backend, saved.policy.model, saved.trainer, Json{{"steps_done", 2}},
               folder.path());

    TinyRun restored(o);
    // Away from where it started; the frozen weights come from the model's own checkpoint.
    restored.step(7);
    const Json extra = restore_state(*restored.policy.backend, restored.policy.model,
                                     restored.trainer, folder.path());
    EXPECT_EQ(extra.dump(), R"({"steps_done":2})");
    EXPECT_TRUE(restored.bytes() == saved.bytes());
    EXPECT_EQ(restored.trainer.num_updates(), 4);
    EXPECT_EQ(restored.trainer.optimizer().num_steps(), 4);
    EXPECT_EQ(restored.policy.model.weights().policy_version(), 4);
    EXPECT_EQ(restored.trainer.calibrator()->state().dump(),
              saved.trainer.calibrator()->state().dump());
    save_state(*restored.policy.backend, restored.policy.model, restored.trainer,
               Json{{"steps_done", 2}}, again.path());
    for (const char* name : {"state.safetensors", "state.json"}) {
      EXPECT_EQ(read_file(again.path(name)), read_file(folder.path(name))) << name;
    }
    for (int64_t step = 2; step < 4; ++step) EXPECT_EQ(saved.step(step), restored.step(step));
    EXPECT_TRUE(restored.bytes() == saved.bytes());
  }
}

TEST(Checkpoint, ANonFiniteStateIsNeverWritten) {
  TinyRun run(full());
  run.step(0);
  for (const bool moment : {false, true}) {
    const auto& slot = run.trainer.optimizer().slots()[5];
    const tensor::TensorView& view = moment ? slot.second_moment : slot.parameter->master;
    const std::vector<float> whole = test::floats_of(*run.policy.backend, view);
    std::vector<float> spoiled = whole;
    spoiled[1] = moment ? HUGE_VALF : std::nanf("");
    run.policy.backend->upload(spoiled.data(), view);
    const io::TempFolder folder;
    const std::string message = error_of([&] {
      save_state(*run.policy.backend, run.policy.model, run.trainer, Json::object(), folder.path());
    });
    expect_contains(message, slot.parameter->name);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    run.policy.backend->upload(whole.data(), view);
  }
}

TEST(Checkpoint, OneOfAnotherModelIsRefused) {
  TinyRun run(full());
  const io::TempFolder folder;
  save_state(*run.policy.backend, run.policy.model, run.trainer, Json::object(), folder.path());
  const auto refusal = [&](const TinyOptions& o) {
    TinyRun other(o);
    return error_of([&] {
      restore_state(*other.policy.backend, other.policy.model, other.trainer, folder.path());
    });
  };
  TinyOptions wider = full();
  wider.inner = 208;
  expect_contains(refusal(wider), "another model");
  TinyOptions deeper = full();
  deeper.layers = 3;
  expect_contains(refusal(deeper), "model.layers.2.");
  TinyOptions shallower = full();
  shallower.layers = 1;
  expect_contains(refusal(shallower), "another model");
  std::filesystem::remove(folder.path("state.json"));
  expect_contains(refusal(full()), "state.json");
  folder.write("state.json", "{\"policy_version\": 1}");
  expect_contains(refusal(full()), "state.json");
}

}  // namespace
}  // namespace octet::loop
