// The memory plan is what a run really takes; the page pool gives way under a limit.
#include <filesystem>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "loop/setup.h"
#include "loop/train_run.h"
#include "unit/io/test_files.h"

namespace octet::loop {
namespace {

using io::error_of;
using io::expect_contains;

TrainConfig make_config(const std::string& dir, const std::string& extra = "",
                        const std::vector<std::string>& overrides = {},
                        const std::string& model_path = "") {
  const std::string init =
      "init = { hidden_size = 96, num_attention_heads = 4, num_key_value_heads = 2, head_dim = 32, "
      "intermediate_size = 200, max_position_embeddings = 64 }";
  return parse_config("[model]\n" + (model_path.empty() ? init : "path = \"" + model_path + "\"") +
                          R"(
max_seq_length = 32
[data]
task = "arithmetic"
task_digits = 1
task_eval_size = 8
[reward]
functions = ["exact_match"]
[rollout]
num_generations = 4
max_completion_length = 6
max_num_seqs = 64
[train]
prompts_per_step = 16
mini_batches = 2
max_steps = 1
micro_batch_tokens = 128
[run]
report_to = []
dir = ")" + dir + "\"\n" + extra,
                      "c.toml", overrides);
}

RunOptions limited(int64_t bytes) {
  RunOptions options;
  options.memory_limit = bytes;
  return options;
}

struct Planned {
  TrainConfig config;
  ModelSource source;
  int64_t num_known;

  explicit Planned(const TrainConfig& c)
      : config(c),
        source(read_model_source(config)),
        num_known(source.text_side.num_known(source.config)) {}
  PolicyOptions options(int64_t limit) const {
    return make_policy_options(config, source.config, num_known, limit);
  }
  int64_t total(const PolicyOptions& o) const {
    return plan_total(plan_training(config, source.config, num_known, o));
  }
};

TEST(MemoryPlan, IsWhatARunTakes) {
  // Adapters need a checkpoint: the result of a first run.
  const io::TempFolder base;
  auto base_backend = cpu::make_cpu_backend({.num_threads = 1});
  const std::string model =
      run_training(*base_backend, make_config(base.path("run")), {}).export_dir;
  const std::string lora = "[lora]\nr = 4\n";
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"", {}},
      {"", {"precision.flow=fp8_full", "model.kv_cache_dtype=fp8", "model.load_in_fp8=channel"}},
      {"", {"precision.flow=fp8_full"}},
      {"", {"algorithm.beta=0.1"}},
      {"", {"algorithm.name=sft"}},
      {"", {"model.dtype=float32"}},
      {lora, {"precision.flow=fp8_lora", "algorithm.beta=0.1", "model.kv_cache_dtype=fp8"}},
  };
  for (const auto& [extra, overrides] : cases) {
    const io::TempFolder folder;
    const Planned setup(
        make_config(folder.path("run"), extra, overrides, extra.empty() ? "" : model));
    const int64_t planned = setup.total(setup.options(0));
    auto backend = cpu::make_cpu_backend({.num_threads = 1});
    const RunResult result = run_training(*backend, setup.config, {});
    EXPECT_EQ(result.steps_done, 1);
    const int64_t peak = backend->allocator().peak_bytes();
    EXPECT_LE(peak, planned) << ::testing::PrintToString(overrides);
    EXPECT_GE(peak, planned * 98 / 100) << ::testing::PrintToString(overrides);
    EXPECT_EQ(backend->allocator().bytes_in_use(), 0);
  }
}

TEST(MemoryPlan, TheAllocatorHoldsARunToItsPlan) {
  const io::TempFolder folder;
  const Planned setup(make_config(folder.path("run")));
  const int64_t planned = setup.total(setup.options(0));
  auto backend = cpu::make_cpu_backend({.num_threads = 1, .memory_limit_bytes = planned});
  EXPECT_EQ(run_training(*backend, setup.config, limited(planned)).steps_done, 1);
}

TEST(MemoryPlan, ThePoolGivesWayUnderALimit) {
  const Planned setup(make_config("unused"));
  const PolicyOptions wanted = setup.options(int64_t{1} << 40);
  EXPECT_EQ(wanted.kv_tokens, 64 * 32);
  const int64_t all = setup.total(wanted);
  const PolicyOptions least = setup.options(1);
  // One micro-batch, every sequence with a page's tail.
  EXPECT_EQ(least.kv_tokens, 128 + 64 * 16);
  const int64_t bottom = setup.total(least);
  ASSERT_LT(bottom, all);
  const int64_t limit = (bottom + all) / 2;
  const PolicyOptions between = setup.options(limit);
  EXPECT_LT(between.kv_tokens, wanted.kv_tokens);
  EXPECT_GT(between.kv_tokens, least.kv_tokens);
  EXPECT_LE(setup.total(between), limit);
  EXPECT_GE(setup.total(between), limit - (all - bottom) / 10);
  EXPECT_EQ(setup.options(all).kv_tokens, wanted.kv_tokens);
  EXPECT_NO_THROW(check_plan(
      plan_training(setup.config, setup.source.config, setup.num_known, between), limit, {}));
}

// What an error advises, as the part of its message after the plan.
std::string advice_for(const std::vector<PlanEntry>& plan, int64_t limit) {
  const PlanAdvice advice{.weights = "WEIGHTS",
                          .reference = "REFERENCE",
                          .lengths = "LENGTHS",
                          .pages = "PAGES",
                          .limit = "LIMIT"};
  const std::string message = error_of([&] { check_plan(plan, limit, advice); });
  return message.substr(message.rfind('\n') + 1);
}

TEST(MemoryPlan, TheAdviceIsForWhatIsLargest) {
  EXPECT_EQ(advice_for({{"BF16 weights", 500}, {"KV pages", 3000}, {"activations", 1000}}, 4000),
            "what helps: LENGTHS, PAGES, WEIGHTS, LIMIT");
  EXPECT_EQ(advice_for({{"BF16 weights", 3000}, {"KV pages", 300}, {"activations", 2700}}, 5000),
            "what helps: WEIGHTS, LENGTHS, LIMIT");
  EXPECT_EQ(advice_for({{"FP8 weights", 100}, {"KL reference", 500}, {"output head", 400}}, 900),
            "what helps: REFERENCE, LENGTHS, WEIGHTS, LIMIT");
  // Where lengths alone cannot help, nothing is said about them, however much they take.
  EXPECT_EQ(advice_for({{"BF16 weights", 2048}, {"KV pages", 1 << 20}}, 2047),
            "2.00 KiB of it are there before the first token; what helps: WEIGHTS, LIMIT");
  const std::vector<PlanEntry> training = {{"master weights", 1000}, {"BF16 weights", 500},
                                           {"gradients", 1000},      {"optimiser", 2000},
                                           {"loading", 10},          {"KV pages", 1}};
  EXPECT_NE(advice_for(training, 4509).find("before the first token"), std::string::npos);
  EXPECT_EQ(advice_for(training, 4510), "what helps: WEIGHTS, LIMIT");
  EXPECT_NO_THROW(check_plan(training, 4511, {}));
}

// The keys that are named are those that lead to a smaller plan.
TEST(MemoryPlan, TheAdviceOfTrainingHelps) {
  const auto total = [](const std::vector<std::string>& overrides) {
    const Planned setup(make_config("unused", "", overrides));
    return setup.total(setup.options(1));
  };
  const int64_t all = total({"algorithm.beta=0.1"});
  for (const char* other : {"train.micro_batch_tokens=64", "train.prompts_per_step=8"}) {
    EXPECT_LT(total({"algorithm.beta=0.1", other}), all) << other;
  }
  EXPECT_LT(total({"algorithm.beta=0.1", "model.max_seq_length=16", "train.micro_batch_tokens=64"}),
            total({"algorithm.beta=0.1", "train.micro_batch_tokens=64"}));
  EXPECT_LT(total({"algorithm.beta=0"}), all);
  EXPECT_LT(total({"algorithm.beta=0.1", "model.kv_cache_dtype=fp8"}), all);
  EXPECT_EQ(total({"algorithm.beta=0.1", "rollout.max_num_seqs=8"}), all);  // so it is not named
  const Planned plain(make_config("unused"));
  const PlanAdvice advice = plan_advice(plain.options(1));
  expect_contains(advice.weights, "[lora]");
  EXPECT_EQ(advice.weights.find("load_in_fp8"), std::string::npos);
  EXPECT_EQ(advice.lengths.find("max_num_seqs"), std::string::npos);
  expect_contains(advice.pages, "kv_cache_dtype");
  // An FP8 pool has a BF16 one beside it for the reference passes of Calibrated Clipping.
  const Planned shadowed(
      make_config("unused", "", {"clip.mode=calibrated", "precision.flow=fp8_full"}));
  EXPECT_EQ(plan_advice(shadowed.options(1)).pages, "");
  PolicyOptions lora = plain.options(1);
  lora.lora.emplace();
  expect_contains(plan_advice(lora).weights, "model.load_in_fp8");
  lora.precision.flow = model::Flow::kFp8Lora;
  EXPECT_EQ(plan_advice(lora).weights, "a smaller model");
}

TEST(MemoryPlan, TooLittleIsAnErrorBeforeAnythingIsMade) {
  const io::TempFolder folder;
  const Planned setup(make_config(folder.path("run")));
  auto backend = cpu::make_cpu_backend({.num_threads = 1});
  const std::string message =
      error_of([&] { run_training(*backend, setup.config, limited(100000)); });
  for (const char* part :
       {"master weights", "optimiser", "KV pages", "total", "run.device_memory_limit"}) {
    expect_contains(message, part);
  }
  EXPECT_EQ(backend->allocator().peak_bytes(), 0);
  EXPECT_FALSE(std::filesystem::exists(folder.path("run")));
}

TEST(MemoryPlan, MoreRoomThanTheModelHasPositionsForIsRefused) {
  Planned setup(make_config("unused"));
  setup.source.config.max_position_embeddings = 31;
  expect_contains(error_of([&] { setup.options(0); }), "max_position_embeddings");
}

// A short pool changes no byte of a run.
TEST(MemoryPlan, AShortPoolGivesTheSameRun) {
  const io::TempFolder folder;
  const auto metrics = [&](const std::string& name, int64_t limit) {
    const TrainConfig config =
        make_config(folder.path(name), "", {"precision.flow=fp8_full", "train.max_steps=2"});
    auto backend = cpu::make_cpu_backend({.num_threads = 1});
    run_training(*backend, config, limited(limit));
    return read_file(folder.path(name) + "/model/model.safetensors");
  };
  const Planned setup(make_config("unused", "", {"precision.flow=fp8_full"}));
  EXPECT_EQ(metrics("short", setup.total(setup.options(1)) + 1000), metrics("long", 0));
}

}  // namespace
}  // namespace octet::loop
