// Calibrated Clipping inside the trainer, against its passes made one by one with models loaded
// from checkpoints.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "rl/calibrated_clipping.h"
#include "train/trainer.h"
#include "unit/io/test_files.h"
#include "unit/train/train_batch.h"

namespace octet::train {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

TinyOptions tiny(model::WeightScales scales) {
  TinyOptions o;
  o.tied = o.qk_norm = true;
  o.precision.flow = model::Flow::kFp8Full;
  o.precision.scales = scales;
  o.fp8_kv = o.shadow = true;
  return o;
}

rl::CalibrationConfig calibration() {
  rl::CalibrationConfig c;
  c.interval = 2;
  c.min_tail = 1;
  return c;
}

TrainerOptions options(int64_t num_iterations, int64_t mini_batches) {
  TrainerOptions o;
  o.loss.type = rl::LossType::kGrpo;
  o.loss.clip = calibration().reference;
  o.num_iterations = num_iterations;
  o.mini_batches = mini_batches;
  o.micro_batch_tokens = 70;
  o.temperature = kTemperature;
  o.learning_rate = 3e-3;
  o.schedule = Schedule::kConstant;
  return o;
}

// Log-probabilities of a BF16 model loaded from the checkpoint that the policy would write now.
std::vector<std::vector<float>> bf16_log_probs(TinyPolicy& p,
                                               std::span<const TrainSample> samples) {
  const io::TempFolder folder;
  model::save_weights(*p.backend, p.model, folder.path());
  TinyOptions o;
  o.tied = o.qk_norm = true;
  o.training = model::Training::kNone;
  o.seed = 1000;
  TinyPolicy bf16(o);
  io::Checkpoint checkpoint(folder.path());
  model::load_weights(*bf16.backend, bf16.model, checkpoint);
  return log_probs_of(bf16, samples);
}

void check_first_step(int64_t num_iterations, int64_t mini_batches, model::WeightScales scales) {
  TinyPolicy p(tiny(scales)), twin(tiny(scales));
  model::KvStore shadow(p.backend->allocator(), p.options.config(), tensor::DType::kBF16, 60);
  const std::vector<TrainSample> samples = make_samples(p);
  TrainerOptions o = options(num_iterations, mini_batches);
  o.calibration = calibration();
  Trainer trainer(*p.backend, p.model, p.policy(), &shadow, o);
  const rl::MetricList metrics = trainer.step(samples, 0);
  EXPECT_EQ(shadow.num_free(), 60);

  // The same updates under the initial bounds.
  TrainerOptions plain = options(1, 1);
  plain.loss.clip = calibration().init;
  Trainer by_hand(*twin.backend, twin.model, twin.policy(), nullptr, plain);
  rl::ClipCalibrator expected(calibration());
  const auto old = bf16_log_probs(twin, samples);
  const size_t size = samples.size() / static_cast<size_t>(mini_batches);
  for (int64_t u = 0; u < num_iterations * mini_batches; ++u) {
    const size_t begin = static_cast<size_t>(u % mini_batches) * size;
    const auto part = std::span(samples).subspan(begin, size);
    if (u > 0) {
      const auto now = bf16_log_probs(twin, part);
      const auto fp8 = log_probs_of(twin, part);
      std::vector<double> reference, ratio, advantage, weight;
      for (size_t i = 0; i < part.size(); ++i) {
        for (size_t t = 0; t < now[i].size(); ++t) {
          reference.push_back(std::exp(static_cast<double>(now[i][t]) - old[begin + i][t]));
          ratio.push_back(std::exp(static_cast<double>(fp8[i][t]) - part[i].sampling_log_probs[t]));
          advantage.push_back(part[i].advantage);
          weight.push_back(std::exp(static_cast<double>(part[i].sampling_log_probs[t])));
        }
      }
      expected.add(rl::CalibrationTokens{reference, ratio, advantage, weight});
    }
    by_hand.step(part, 0);
  }
  EXPECT_TRUE(test::weight_bytes(p) == test::weight_bytes(twin));
  const rl::CalibrationTarget target = expected.calibrate();
  ASSERT_TRUE(target.low.has_value()) << "the made case must move the bounds";
  EXPECT_EQ(trainer.calibrator()->state().dump(), expected.state().dump());
  EXPECT_EQ(metric(metrics, "calibration/low"), expected.bounds().low);
  EXPECT_EQ(metric(metrics, "calibration/high"), expected.bounds().high);
  EXPECT_EQ(metric(metrics, "calibration/alpha"), target.alpha);
  EXPECT_NE(expected.bounds().low, calibration().init.low);
}

// The first mini-batch is left out: its ratios are 1.
TEST(CalibrationInTraining, TwoMiniBatches) {
  for (const model::WeightScales scales :
       {model::WeightScales::kTensor, model::WeightScales::kChannel, model::WeightScales::kBlock}) {
    check_first_step(1, 2, scales);
  }
}

// A second iteration comes back to the first mini-batch, whose ratios are no longer 1.
TEST(CalibrationInTraining, TwoIterations) {
  check_first_step(2, 1, model::WeightScales::kBlock);
  check_first_step(2, 2, model::WeightScales::kBlock);
}

TEST(CalibrationInTraining, BoundsMoveOnDueStepsOnly) {
  TinyPolicy p(tiny(model::WeightScales::kBlock));
  model::KvStore shadow(p.backend->allocator(), p.options.config(), tensor::DType::kBF16, 60);
  TrainerOptions o = options(1, 2);
  o.calibration = calibration();
  Trainer trainer(*p.backend, p.model, p.policy(), &shadow, o);
  std::vector<double> low = {calibration().init.low};
  for (int64_t step = 0; step < 4; ++step) {
    std::vector<TrainSample> samples = make_samples(p);
    const rl::MetricList metrics = trainer.step(samples, step);
    low.push_back(trainer.calibrator()->bounds().low);
    EXPECT_EQ(metric(metrics, "calibration/low"), low.back());
    EXPECT_EQ(metric(metrics, "calibration/alpha").has_value(), step % 2 == 0);
  }
  EXPECT_NE(low[1], low[0]);
  EXPECT_EQ(low[2], low[1]);
  EXPECT_EQ(low[4], low[3]);
}

TEST(CalibrationInTraining, OneUpdatePerRolloutHasNothingToMeasure) {
  TinyPolicy p(tiny(model::WeightScales::kBlock));
  model::KvStore shadow(p.backend->allocator(), p.options.config(), tensor::DType::kBF16, 60);
  TrainerOptions o = options(1, 1);
  o.calibration = calibration();
  Trainer trainer(*p.backend, p.model, p.policy(), &shadow, o);
  const rl::MetricList metrics = trainer.step(make_samples(p), 0);
  EXPECT_EQ(metric(metrics, "calibration/low"), calibration().init.low);
  EXPECT_EQ(metric(metrics, "calibration/alpha"), std::nullopt);
  EXPECT_EQ(trainer.calibrator()->tail(), 0);
}

}  // namespace
}  // namespace octet::train
