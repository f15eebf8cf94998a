// `octet train`: what a run leaves, exactness within it, and that two runs are equal.
#include <filesystem>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "system/train_support.h"

namespace octet::test {
namespace {

namespace fs = std::filesystem;

bool exists(const std::string& path) { return fs::exists(path); }

TEST(TrainRun, LeavesAWholeFolder) {
  const Trainer trainer;
  const std::string sft = trainer.trained("sft", kSft + Arguments{"train.max_steps=3"});
  // The result of SFT is where RL starts.
  const Trainer second(tiny_config_on(sft + "/model"));
  const std::string run =
      second.trained("run", kFp8Full + Arguments{"train.save_steps=2", "train.eval_steps=2"});

  // config.toml is the whole config: reading it back gives the same file.
  const Outcome resolved = octet({"doctor", run + "/config.toml"});
  EXPECT_EQ(resolved.exit_code, 0) << resolved.err;
  EXPECT_NE(resolved.out.find(read_text(run + "/config.toml")), std::string::npos);

  const Json provenance = Json::parse(read_text(run + "/provenance.json"));
  for (const char* name :
       {"octet_version", "compiler", "libraries", "backend", "flow", "load_in_fp8",
        "kv_cache_dtype", "model", "lengths", "batch", "optim", "seeds", "data", "num_steps"}) {
    EXPECT_TRUE(provenance.contains(name)) << name;
  }
  EXPECT_EQ(provenance["load_in_fp8"], "block");  // not "auto": what was used
  EXPECT_NE(provenance["backend"].get<std::string>().find("cpu ("), std::string::npos);
  EXPECT_EQ(provenance["seeds"]["run"], 42);
  EXPECT_EQ(provenance["data"]["num_train"], 92);

  EXPECT_TRUE(exists(run + "/checkpoints/step-000002/manifest.json"));
  EXPECT_TRUE(exists(run + "/checkpoints/step-000004/state.safetensors"));
  EXPECT_TRUE(has_event(run, "start"));
  EXPECT_TRUE(has_event(run, "done", run + "/model"));
  const fs::directory_iterator tensorboard(run + "/tensorboard");
  EXPECT_NE(tensorboard->path().filename().string().find("events.out.tfevents."),
            std::string::npos);
  EXPECT_GT(fs::file_size(tensorboard->path()), 1000u);

  const std::vector<Json> samples = read_lines(run + "/completions/step-000003.jsonl");
  ASSERT_EQ(samples.size(), 16u);
  for (const char* name : {"step", "prompt", "completion", "num_tokens", "finish_reason", "reward",
                           "rewards", "advantage"}) {
    EXPECT_TRUE(samples[0].contains(name)) << name;
  }
  const Outcome text =
      octet({"generate", "--model", run + "/model", "--max-new-tokens", "3", "1+2="});
  EXPECT_EQ(text.exit_code, 0) << text.err;
}

std::set<std::string> names_of(const Json& line) {
  std::set<std::string> names;
  for (const auto& [name, value] : line.items()) names.insert(name);
  return names;
}

TEST(TrainRun, MetricsHaveTheirNamesAndNothingElse) {
  const Trainer trainer;
  const std::set<std::string> both = {"step",        "loss",       "entropy",
                                      "grad_norm",   "num_tokens", "learning_rate",
                                      "num_updates", "step_time",  "train_tokens_per_second"};
  std::set<std::string> rl = both;
  rl.insert({"reward",
             "reward_std",
             "frac_reward_zero_std",
             "rewards/regex/mean",
             "rewards/regex/std",
             "completions/mean_length",
             "completions/min_length",
             "completions/max_length",
             "completions/clipped_ratio",
             "loss/policy",
             "clip_ratio/low_mean",
             "clip_ratio/high_mean",
             "clip_ratio/region_mean",
             "ratio/mean",
             "ratio/min",
             "ratio/max",
             "ratio/p01",
             "ratio/p50",
             "ratio/p99",
             "ratio/outliers",
             "train_rollout_logprob_abs_diff",
             "train_rollout_logprob_abs_diff_max",
             "token_mult_prob_error",
             "rollout_tokens_per_second",
             "time/rollout",
             "time/reward",
             "time/train"});
  // These depend on what was sampled.
  const std::set<std::string> at_times = {"completions/mean_terminated_length",
                                          "clip_ratio/low_negative", "clip_ratio/high_positive"};
  const auto check = [&](const std::string& run, std::set<std::string> wanted) {
    for (const Json& line : metrics_of(run)) {
      std::set<std::string> names = names_of(line);
      if (line["step"] == 0) continue;
      if (line["step"] == 4)
        names.erase("eval/reward"), names.erase("eval/completions/mean_length");
      for (const std::string& name : at_times) names.erase(name);
      EXPECT_EQ(names, wanted) << run;
    }
  };
  check(trainer.trained("bf16"), rl);
  check(trainer.trained("sft", kSft), both);
  std::set<std::string> fp8 = rl;
  fp8.insert({"fp8/saturated", "fp8/underflowed"});
  check(trainer.trained("fixed", kFp8Full + Arguments{"clip.mode=fixed"}), fp8);
  fp8.insert({"calibration/low", "calibration/high"});
  check(trainer.trained(
            "idle", kFp8Full + Arguments{"clip.calibration_interval=1000", "train.mini_batches=1"}),
        [&] {
          std::set<std::string> without = fp8;
          without.erase("calibration/low");
          without.erase("calibration/high");
          return without;
        }());
  EXPECT_TRUE(has_event(trainer.path("idle"), "calibration_idle", "mini_batches"));
  rl.insert("kl");
  check(trainer.trained("kl", {"algorithm.beta=0.1"}), rl);
}

TEST(TrainRun, TheNextCommandComputesAsTheRunDid) {
  const Trainer trainer(tiny_config_on(tiny_model()));
  const auto told = [&](const std::string& run, const Arguments& more) {
    const Outcome outcome = trainer.train(run, Arguments{"train.max_steps=1"} + more);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.out.find("//"), std::string::npos) << outcome.out;
    return outcome.out.substr(outcome.out.find("next:"));
  };
  EXPECT_EQ(told("bf16/", {}).find("--flow"), std::string::npos);  // its own choice
  EXPECT_NE(told("full", kFp8Full)
                .find(trainer.path("full/model") + " --flow fp8_full --load-in-fp8 block "
                                                   "--kv-cache-dtype fp8 \""),
            std::string::npos);
  EXPECT_NE(told("lora//", kFp8Lora + Arguments{"model.load_in_fp8=channel"})
                .find(trainer.path("lora/adapter") + " --flow fp8_lora --load-in-fp8 channel \""),
            std::string::npos);
}

TEST(TrainRun, TheRolloutIsTheTrainer) {
  const Trainer trainer(tiny_config_on(tiny_model()));
  std::vector<Arguments> flows = {{"precision.flow=bf16"}, {"precision.flow=bf16", "lora.r=4"}};
  for (const char* granularity : {"tensor", "channel", "block"}) {
    const Arguments scale = {std::string("model.load_in_fp8=") + granularity};
    flows.push_back(scale + Arguments{"precision.flow=fp8_full"});
    flows.push_back(scale + kFp8Lora);
  }
  flows.push_back({"rollout.top_k=4", "rollout.top_p=0.9", "rollout.min_p=0.01"});
  int number = 0;
  for (const Arguments& flow : flows) {
    for (const char* kv : {"bf16", "fp8"}) {
      const std::string run = trainer.trained(
          "run" + std::to_string(++number),
          flow + Arguments{std::string("model.kv_cache_dtype=") + kv, "train.max_steps=3",
                           "rollout.temperature=0.7", "train.micro_batch_tokens=40"});
      EXPECT_EQ(values_of(run, "train_rollout_logprob_abs_diff_max"), std::vector<double>(3, 0.0))
          << flow[0] << " " << kv;
      // The weights did move in between.
      for (const double norm : values_of(run, "grad_norm")) EXPECT_GT(norm, 0) << flow[0];
    }
  }
}

TEST(TrainRun, TwoRunsAreEqual) {
  const Trainer trainer(tiny_config_on(tiny_model()));
  int number = 0;
  const auto check = [&](const Arguments& arguments) {
    const std::string name = "run" + std::to_string(++number);
    const std::string first = trainer.trained(name + "a", arguments);
    expect_equal_runs(first, trainer.trained(name + "b", arguments));
    expect_equal_runs(first, trainer.trained(name + "c", arguments + Arguments{"run.threads=2"}));
    EXPECT_TRUE(exists(first + "/model") || exists(first + "/adapter"));
  };
  check({});
  check(kFp8Full);
  check(kFp8Lora);
  check(kSft);
  // The bounds moved, so that their state was compared too.
  EXPECT_NE(values_of(trainer.path("run2a"), "calibration/low").back(), 0.6);
  // Another seed is another run.
  const std::string other = trainer.trained("other", {"run.seed=43"});
  EXPECT_NE(read_text(other + "/completions/step-000001.jsonl"),
            read_text(trainer.path("run1a") + "/completions/step-000001.jsonl"));
}

TEST(TrainRun, AnAdapterIsTheResultOfLora) {
  const TextModel model("peft/base");
  const Trainer trainer("[model]\npath = \"" + model.path() + "\"\nmax_seq_length = 32\n" +
                        kTinyConfig.substr(kTinyConfig.find("[data]")));
  const std::string run = trainer.trained("run", kFp8Lora);
  const Outcome text = octet({"generate", "--model", model.path(), "--adapter", run + "/adapter",
                              "--max-new-tokens", "3", "1+2="});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_FALSE(exists(run + "/model"));
}

TEST(TrainRun, DoctorPrintsTheConfigAndThePlan) {
  const Trainer trainer(tiny_config_on(tiny_model()));
  for (const Arguments& arguments :
       {Arguments{}, kSft, kFp8Full, kFp8Lora, Arguments{"algorithm.beta=0.1"}}) {
    const Outcome outcome = trainer.doctor(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    for (const char* word : {"memory plan:", "KV pages", "total", "epsilon_high = ",
                             "learning_rate = 0.01", "92 training rows, 0 left out, 8 for"}) {
      EXPECT_NE(outcome.out.find(word), std::string::npos) << word << "\n" << outcome.out;
    }
    EXPECT_EQ(outcome.out.find("KL reference") != std::string::npos,
              arguments == Arguments{"algorithm.beta=0.1"});
    EXPECT_FALSE(exists(trainer.path("doctor")));
  }
}

TEST(TrainRun, RowsOfAFileThroughTheChatTemplate) {
  const TextModel model("models/qwen3-tiny",
                        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
                        "{% if add_generation_prompt %}assistant:{% endif %}");
  const Trainer trainer("[model]\npath = \"" + model.path() + "\"\nmax_seq_length = 64\n" +
                        "[data]\nsystem_prompt = \"S\"\n" +
                        kTinyConfig.substr(kTinyConfig.find("[reward]")));
  write_text(trainer.path("rl.jsonl"),
             R"({"prompt":"ab"})"
             "\n"
             R"({"prompt":[{"role":"user","content":"cd"}]})"
             "\n"
             R"({"prompt":[{"role":"system","content":"T"},{"role":"user","content":"ef"}]})"
             "\n");
  const std::string run =
      trainer.trained("run", {"data.train=" + trainer.path("rl.jsonl"), "train.prompts_per_step=3",
                              "train.max_steps=1", "rollout.stop=[\"<|im_end|>\"]",
                              "rollout.max_completion_length=40"});
  std::set<std::string> prompts;
  bool stopped = false;
  for (const Json& sample : read_lines(run + "/completions/step-000001.jsonl")) {
    prompts.insert(sample["prompt"]);
    stopped |= sample["finish_reason"] == "stop";
    EXPECT_EQ(sample["completion"].get<std::string>().find("<|"), std::string::npos);
  }
  EXPECT_TRUE(stopped);  // at the end token, or at a stop string that is a special token
  EXPECT_EQ(prompts, (std::set<std::string>{"system:S<|im_end|>user:ab<|im_end|>assistant:",
                                            "system:S<|im_end|>user:cd<|im_end|>assistant:",
                                            "system:T<|im_end|>user:ef<|im_end|>assistant:"}));

  // SFT on conversations: evaluation without a reward is the loss on held-out ones.
  write_text(trainer.path("sft.jsonl"),
             R"({"messages":[{"role":"user","content":"ab"},{"role":"assistant","content":"c"}]})"
             "\n");
  const std::string file = trainer.path("sft.jsonl");
  const std::string sft =
      trainer.trained("sft", kSft + Arguments{"data.train=" + file, "data.eval=" + file,
                                              "reward.functions=[]", "train.prompts_per_step=2",
                                              "train.mini_batches=1", "train.max_steps=6"});
  const std::vector<double> loss = values_of(sft, "eval/loss");
  ASSERT_EQ(loss.size(), 2u);
  // The first step's loss is of the same text, before any update.
  EXPECT_NEAR(loss[0], values_of(sft, "loss")[0], 1e-5);
  EXPECT_LT(loss[1], loss[0]);
}

TEST(TrainRun, WhatToTypeNextIsAsAShellReadsIt) {
  const Trainer trainer;
  const Arguments one = {"train.max_steps=1"};
  const Outcome rl = trainer.train("my run", one);
  ASSERT_EQ(rl.exit_code, 0) << rl.err;
  EXPECT_NE(rl.out.find("--model '" + trainer.path("my run/model") + "' "), std::string::npos)
      << rl.out;
  EXPECT_NE(rl.out.find("completions/"), std::string::npos);
  // Only what is there is named.
  EXPECT_EQ(trainer.train("sft", kSft + one).out.find("completions/"), std::string::npos);
}

}  // namespace
}  // namespace octet::test
