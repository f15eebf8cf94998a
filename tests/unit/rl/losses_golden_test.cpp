// The losses against TRL 1.16's own numbers (float64; our log-probabilities are float32).
#include <cmath>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "unit/rl/loss_batch.h"

namespace octet::rl {
namespace {

// The inputs lie in [−4, 0] and are rounded to float32, 2^-23 each: a log-ratio is off by at most
// 5e-7 and a token's term, with r|A| below 4, by 2e-6.
constexpr double kTolerance = 2e-6;

Json golden() { return read_json_file(OCTET_SOURCE_DIR "/tests/golden/data/losses/trl.json"); }

LossBatch batch_of(const Json& inputs) {
  LossBatch batch;
  for (size_t i = 0; i < inputs.at("mask").size(); ++i) {
    LossRow row;
    const auto floats = [&](const char* name) {
      return inputs.at(name).at(i).get<std::vector<float>>();
    };
    row.log_probs = floats("logprobs");
    row.old_log_probs = floats("old_logprobs");
    row.ref_log_probs = floats("ref_logprobs");
    for (const float kept : floats("mask")) row.mask.push_back(kept != 0);
    row.advantage = inputs.at("advantages").at(i).get<double>();
    batch.rows.push_back(std::move(row));
  }
  return batch;
}

// The settings that this test reads; a case with any other belongs to a loss that is not here.
bool supported(const Json& setting) {
  const std::string type = setting.at("loss_type");
  if (type != "grpo" && type != "bnpo" && type != "dapo" && type != "dr_grpo") return false;
  for (const auto& [key, value] : setting.items()) {
    if (key == "delta" || key == "importance_sampling_level" || key == "top_entropy_quantile" ||
        key == "entropy_coef") {
      return false;
    }
  }
  return true;
}

TEST(LossesGolden, EqualTrl) {
  const Json file = golden();
  int num_cases = 0;
  for (const Json& output : file.at("outputs")) {
    const Json& setting = output.at("case");
    if (!supported(setting)) continue;
    SCOPED_TRACE(setting.dump());
    ++num_cases;
    LossBatch batch = batch_of(file.at("inputs"));
    if (setting.contains("rollout_is")) {  // token-level truncated importance sampling
      const double most = setting.at("rollout_is_threshold");
      for (size_t i = 0; i < batch.rows.size(); ++i) {
        const auto sampling =
            file.at("inputs").at("sampling_logprobs").at(i).get<std::vector<double>>();
        LossRow& row = batch.rows[i];
        for (size_t t = 0; t < sampling.size(); ++t) {
          const double weight = std::exp(row.old_log_probs[t] - sampling[t]);
          row.policy_weights.push_back(static_cast<float>(std::min(weight, most)));
        }
      }
    }
    LossConfig config;
    config.type = parse_loss_type(setting.at("loss_type").get<std::string>(), "test");
    config.clip = ClipBounds::from_epsilon(setting.at("epsilon"), setting.at("epsilon_high"));
    config.beta = setting.value("beta", 0.0);
    config.max_completion_length = setting.value("max_completion_length", 0);

    const LossResult result = batch.run(config);
    EXPECT_NEAR(result.loss, output.at("loss").get<double>(), kTolerance);
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      const auto expected = output.at("gradient").at(i).get<std::vector<double>>();
      for (size_t t = 0; t < expected.size(); ++t) {
        EXPECT_NEAR(batch.rows[i].gradient[t], expected[t], kTolerance) << i << ", " << t;
      }
    }
    const MetricList metrics = result.metrics.metrics();
    for (const auto& [name, value] : output.at("metrics").items()) {
      if (name == "entropy") continue;  // of the model, not of the loss
      EXPECT_NEAR(metric(metrics, name), value.get<double>(), kTolerance) << name;
    }
  }
  EXPECT_EQ(num_cases, 7);
}

}  // namespace
}  // namespace octet::rl
