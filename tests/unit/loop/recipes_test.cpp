// Every file of recipes/ is a config that Octet takes.
#include <filesystem>

#include <gtest/gtest.h>

#include "base/strings.h"
#include "loop/config.h"

namespace octet::loop {
namespace {

const std::string kRecipes = OCTET_SOURCE_DIR "/recipes/";

TEST(Recipes, AllAreRead) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kRecipes)) {
    if (entry.path().extension() != ".toml") continue;
    const TrainConfig config = read_config(entry.path().string());
    EXPECT_TRUE(parse_config(print_config(config), "config.toml") == config) << entry.path();
    EXPECT_EQ(config.run.dir, "runs/" + entry.path().stem().string());
    ++count;
  }
  EXPECT_GE(count, 4);
}

TEST(Recipes, TheDemoIsAsItIsDescribed) {
  const TrainConfig sft = read_config(kRecipes + "demo-sft.toml");
  EXPECT_EQ(sft.algorithm.name, "sft");
  EXPECT_GT(sft.data.task_wrong_share, 0.5);
  EXPECT_EQ(sft.train.prompts_per_step, 64);
  const TrainConfig grpo = read_config(kRecipes + "demo-grpo.toml");
  EXPECT_EQ(grpo.model.path, sft.run.dir + "/model");
  EXPECT_EQ(grpo.precision.flow, "fp8_full");
  EXPECT_EQ(grpo.model.load_in_fp8, "block");
  EXPECT_EQ(grpo.model.kv_cache_dtype, "fp8");
  EXPECT_EQ(grpo.clip.mode, "calibrated");
  EXPECT_EQ(grpo.clip.calibration_interval, 5);
  EXPECT_EQ(grpo.clip.calibration_min_tail, 10);
  EXPECT_EQ(grpo.train.prompts_per_step * grpo.rollout.num_generations, 256);
  EXPECT_EQ(grpo.train.mini_batches, 4);
  // Both see the same held-out problems.
  EXPECT_EQ(grpo.data.task_seed, sft.data.task_seed);
  EXPECT_EQ(grpo.data.task_eval_size, sft.data.task_eval_size);
  EXPECT_EQ(grpo.data.task_digits, sft.data.task_digits);
}

}  // namespace
}  // namespace octet::loop
