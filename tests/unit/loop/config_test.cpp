#include "loop/config.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/strings.h"
#include "loop/config_keys.h"

namespace octet::loop {
namespace {

// The least that is a valid RL config.
const std::string kBase = R"([model]
path = "models/tiny"
[data]
train = "train.jsonl"
[reward]
functions = ["gsm8k"]
)";

TrainConfig parse(const std::string& extra, std::vector<std::string> overrides = {}) {
  return parse_config(kBase + extra, "runs/tiny.toml", overrides);
}

// The message of the UsageError that the config raises, "" where it raises none.
std::string refusal(const std::string& text, std::vector<std::string> overrides = {}) {
  try {
    parse_config(text, "c.toml", overrides);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

::testing::AssertionResult says(const std::string& message, std::vector<std::string> parts) {
  for (const std::string& part : parts) {
    if (message.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << '"' << part << "\" is not in: " << message;
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(Config, TheExampleOfTheManualIsRead) {
  const TrainConfig c = parse(R"(
[precision]
flow = "fp8_lora"
[lora]
r = 32
lora_alpha = 64
[rollout]
num_generations = 4
temperature = 1
[train]
prompts_per_step = 64
mini_batches = 4
)",
                              {"model.load_in_fp8=true", "optim.learning_rate=3e-6"});
  EXPECT_EQ(c.precision.flow, "fp8_lora");
  EXPECT_EQ(c.lora->r, 32);
  EXPECT_EQ(c.lora->lora_alpha, 64.0);
  EXPECT_EQ(c.rollout.temperature, 1.0);
  EXPECT_EQ(c.train.prompts_per_step, 64);
  EXPECT_EQ(c.model.load_in_fp8, "channel");
  EXPECT_EQ(c.optim.learning_rate, 3e-6);
  EXPECT_EQ(c.reward.functions, std::vector<std::string>{"gsm8k"});
  EXPECT_EQ(c.run.dir, "runs/tiny");
}

TEST(Config, DefaultsThatDependOnOtherKeys) {
  EXPECT_EQ(parse("").clip.mode, "fixed");
  EXPECT_EQ(parse("").clip.epsilon_high, 0.28);
  EXPECT_EQ(parse("").model.load_in_fp8, "false");
  EXPECT_EQ(parse("[algorithm]\nloss_type = \"grpo\"\n[clip]\nepsilon = 0.1").clip.epsilon_high,
            0.1);
  const TrainConfig fp8 = parse("[algorithm]\nloss_type='grpo'\n[precision]\nflow='fp8_full'");
  EXPECT_EQ(fp8.clip.mode, "calibrated");
  EXPECT_EQ(fp8.clip.epsilon_high, 0.24);
  EXPECT_EQ(fp8.model.load_in_fp8, "auto");
  EXPECT_EQ(parse("[algorithm]\nloss_type='dr_grpo'").algorithm.scale_rewards, "none");
  EXPECT_EQ(parse("").optim.learning_rate, 1e-6);
  EXPECT_EQ(parse("[algorithm]\nname='sft'").optim.learning_rate, 2e-5);
  EXPECT_EQ(parse("[algorithm]\nname='sft'").algorithm.loss_type, "sft");
  EXPECT_EQ(parse("[optim]\nlearning_rate = 0").optim.learning_rate, 0.0);
}

TEST(Config, OverridesTakeTomlValuesAndBareWords) {
  const TrainConfig c = parse(
      "", {"run.dir=runs/other", "reward.functions=[\"gsm8k\",\"boxed\"]", "train.max_steps = 7",
           "data.shuffle=false", "data.chat_template_kwargs={enable_thinking=false}",
           "run.device_memory_limit=5GiB", "run.report_to=none", "data.system_prompt=2026",
           "rollout.stop=\"a=b\""});
  EXPECT_EQ(c.run.dir, "runs/other");
  EXPECT_EQ(c.reward.functions, (std::vector<std::string>{"gsm8k", "boxed"}));
  EXPECT_EQ(c.train.max_steps, 7);
  EXPECT_FALSE(c.data.shuffle);
  EXPECT_EQ(c.data.chat_template_kwargs.text, R"({"enable_thinking":false})");
  EXPECT_EQ(c.run.device_memory_limit, int64_t{5} << 30);
  EXPECT_TRUE(c.run.report_to.empty());
  EXPECT_EQ(c.data.system_prompt, "2026");
  EXPECT_EQ(c.rollout.stop, std::vector<std::string>{"a=b"});

  EXPECT_TRUE(says(refusal(kBase, {"train.max_steps"}), {"section.key=value"}));
  EXPECT_TRUE(says(refusal(kBase, {"train.max_step=3"}), {"command line", "train.max_steps"}));
  EXPECT_TRUE(says(refusal(kBase, {"train.max_steps=three"}), {"an integer", "a string"}));
  // A value cannot smuggle in a second key.
  EXPECT_EQ(parse("", {"run.dir=\"x\"\ntrain = 1"}).run.dir, "\"x\"\ntrain = 1");
  for (const char* seed : {"9223372036854775808", "-9223372036854775809"}) {
    EXPECT_TRUE(says(refusal(kBase, {std::string("run.seed=") + seed}), {seed, "64 bits"}));
    EXPECT_TRUE(says(refusal(std::string("[run]\nseed = ") + seed), {"c.toml:2", "64 bits"}));
  }
  EXPECT_TRUE(says(refusal(kBase, {"run.dir=\xff"}), {"UTF-8"}));
}

TEST(Config, TheResolvedFileReadsBackEqual) {
  const std::string extra = R"(
[precision]
flow = "fp8_lora"
[lora]
target_modules = ["q_proj"]
[optim]
learning_rate = 1
adam_epsilon = 1e-30
[run]
dir = "runs/tab\there \"quoted\" \\ ü \u0001"
)";
  const TrainConfig c = parse(
      extra, {"data.chat_template_kwargs={a={b=[1,2.0,\"x\"]},\"c d\"=1e300}", "rollout.stop=[]"});
  const std::string printed = print_config(c);
  const TrainConfig again = parse_config(printed, "config.toml");
  EXPECT_TRUE(c == again) << printed << print_config(again);
  EXPECT_EQ(print_config(again), printed);

  const TrainConfig small = parse_config(R"(
[model]
init = { hidden_size = 64, seed = 3 }
[data]
task = "arithmetic"
[algorithm]
name = "sft"
[train]
max_steps = 3
)",
                                         "c.toml");
  EXPECT_TRUE(parse_config(print_config(small), "config.toml") == small) << print_config(small);
}

TEST(Config, UnknownNamesGetTheNearest) {
  EXPECT_TRUE(
      says(refusal("\n[train]\nmax_stepz = 3"), {"c.toml:3", "max_stepz", "train.max_steps"}));
  EXPECT_TRUE(says(refusal("[trian]\nmax_steps = 3"), {"c.toml:1", "[train]"}));
  EXPECT_TRUE(says(refusal("[train]\nlearning_rate = 3"), {"optim.learning_rate"}));
  EXPECT_TRUE(says(refusal("max_steps = 3"), {"train.max_steps"}));
  EXPECT_TRUE(says(refusal("model = 3"), {"section", "an integer"}));
  EXPECT_TRUE(says(refusal("[train]\nzzzzzzzzzzz = 3"), {"no known key", "docs/configuration.md"}));
  EXPECT_TRUE(says(refusal("[train]\nmax_steps = 3\nmax_steps = 4"), {"c.toml:3", "TOML"}));
}

TEST(Config, NamesOfOtherProgramsGetOctets) {
  EXPECT_TRUE(
      says(refusal("[train]\nper_device_train_batch_size = 3"), {"TRL", "train.prompts_per_step"}));
  EXPECT_TRUE(says(refusal("[optim]\nlr = 3"), {"verl", "optim.learning_rate"}));
  EXPECT_TRUE(says(refusal("[actor_rollout_ref.actor.optim]\nlr = 3"), {"is no known section"}));
  EXPECT_TRUE(says(refusal("", {"actor_rollout_ref.actor.optim.lr=3"}), {"optim.learning_rate"}));
  EXPECT_TRUE(says(refusal("[model]\nload_in_4bit = true"), {"Unsloth", "model.load_in_fp8"}));
  EXPECT_TRUE(
      says(refusal("[rollout]\nuse_vllm = true"), {"TRL", "no counterpart", "leave it out"}));
  for (const Alias& alias : config_aliases()) {
    const std::string message = refusal("", {"train." + alias.theirs + "=1"});
    const std::string here = alias.name.empty() ? "no counterpart" : "\"" + alias.name + "\"";
    EXPECT_TRUE(says(message, {alias.owner, here})) << alias.theirs;
  }
}

TEST(Config, WrongTypesValuesAndRanges) {
  EXPECT_TRUE(says(refusal("[train]\nmax_steps = \"3\""), {":2", "an integer", "a string"}));
  EXPECT_TRUE(says(refusal("[train]\nmax_steps = 3.5"), {"an integer", "fraction"}));
  EXPECT_TRUE(says(refusal("[data]\nshuffle = 1"), {"true or false", "an integer"}));
  EXPECT_TRUE(says(refusal("[reward]\nfunctions = [1]"), {"list of strings"}));
  EXPECT_TRUE(says(refusal("[clip]\ncalibration_init = 1"), {"list of numbers"}));
  EXPECT_TRUE(says(refusal("[data]\nchat_template_kwargs = 1"), {"a table"}));
  EXPECT_TRUE(says(refusal("[data]\nchat_template_kwargs = {a=inf}"), {"finite"}));
  EXPECT_TRUE(says(refusal("[model]\nkv_cache_dtype = \"fp4\""),
                   {"\"bf16\", \"fp8\"", "\"fp4\"", "did you mean \"fp8\""}));
  EXPECT_TRUE(says(refusal("[optim]\nlearning_rate = -1e-6"), {"at least 0", "-1e-06"}));
  EXPECT_TRUE(says(refusal("[optim]\nlearning_rate = nan"), {"at least 0"}));
  EXPECT_TRUE(says(refusal("[optim]\nlearning_rate = inf"), {"at least 0"}));
  // What is no number in float32, where it is used, and a temperature that no logit survives.
  EXPECT_TRUE(says(refusal("[optim]\nlearning_rate = 1e300"), {"float32", "1e+300"}));
  EXPECT_TRUE(says(refusal("[optim]\nadam_epsilon = 1e-60"), {"float32", "1e-60"}));
  EXPECT_TRUE(says(refusal("[rollout]\ntemperature = 1e-38"), {"at least 1e-06", "1e-38"}));
  EXPECT_TRUE(says(refusal("[rollout]\ntemperature = 1e7"), {"at most 1000000"}));
  EXPECT_TRUE(says(refusal("[rollout]\ntop_p = 1.01"), {"at most 1"}));
  EXPECT_TRUE(says(refusal("[rollout]\ntop_p = 0"), {"above 0"}));
  EXPECT_TRUE(says(refusal("[run]\ndevice_memory_limit = \"5 parsecs\""), {"5GiB"}));
  EXPECT_TRUE(says(refusal(kBase + "[rollout]\nnum_generations = 1"), {"at least 2", ":8"}));
}

TEST(Config, ListsHoldDistinctTexts) {
  for (const char* key : {"reward.functions", "run.report_to", "lora.target_modules"}) {
    const std::string twice = std::string(key) == "reward.functions" ? "gsm8k"
                              : std::string(key) == "run.report_to"  ? "tensorboard"
                                                                     : "q_proj";
    EXPECT_TRUE(says(refusal(kBase, {fmt::format("{0}=[\"{1}\",\"{1}\"]", key, twice)}),
                     {key, "twice", twice}));
  }
  EXPECT_TRUE(says(refusal(kBase, {"rollout.stop=[\"a\",\"\"]"}), {"rollout.stop", "empty"}));
  EXPECT_TRUE(says(refusal(kBase, {"rollout.stop=\"\""}), {"rollout.stop", "empty"}));
  EXPECT_TRUE(says(refusal(kBase + "[run]\ndir = ''"), {":8", "run.dir", "empty"}));
}

TEST(Config, ConflictingKeys) {
  const auto refused = [](const std::string& extra) { return refusal(kBase + extra); };
  EXPECT_EQ(refused(""), "");
  EXPECT_TRUE(says(refused("[precision]\nflow='bf16'\n[clip]\nmode='calibrated'"), {"FP8 flow"}));
  EXPECT_TRUE(says(refusal(kBase, {"model.load_in_fp8=block"}), {"needs an FP8 flow"}));
  EXPECT_TRUE(says(refusal(kBase, {"model.load_in_fp8=false", "precision.flow=fp8_full"}),
                   {"needs a granularity"}));
  EXPECT_TRUE(says(refused("[precision]\nflow='fp8_lora'"), {"[lora]", ":8"}));
  EXPECT_TRUE(says(refused("[precision]\nflow='fp8_full'\n[lora]"), {"[lora]"}));
  EXPECT_TRUE(says(refused("[lora]\nlora_dropout=0.1"), {"must be 0", ":8"}));
  EXPECT_TRUE(says(refused("[lora]\ntarget_modules=[]"), {"is empty"}));
  EXPECT_TRUE(says(refused("[train]\nprompts_per_step=3\nmini_batches=5"), {"24", "divide", "5"}));
  EXPECT_TRUE(says(refused("[rollout]\nmax_completion_length=2048"), {"max_seq_length"}));
  EXPECT_TRUE(says(refused("[train]\neval_steps=5"), {"data.eval"}));
  EXPECT_TRUE(says(refused("[algorithm]\nloss_type='sft'"), {"does not go with"}));
  EXPECT_TRUE(says(refused("[clip]\ncalibration_init=[0.3, 1.8]"), {"[0.5, 0.9]"}));
  EXPECT_TRUE(says(refusal(kBase, {"data.task=arithmetic"}), {"both are"}));
  EXPECT_TRUE(says(refusal(kBase, {"data.train="}), {"neither is"}));
  EXPECT_TRUE(says(refusal(kBase, {"model.init.seed=1"}), {"both are"}));
  EXPECT_TRUE(says(refusal(kBase, {"model.path="}), {"neither is"}));
  EXPECT_TRUE(says(refusal(kBase, {"reward.functions=[]"}), {"reward.command"}));
  EXPECT_TRUE(says(refusal(kBase, {"reward.functions=regex"}), {"reward.pattern"}));
  EXPECT_TRUE(says(refusal(kBase, {"reward.functions=length"}), {"reward.soft_punish_cache"}));
  EXPECT_TRUE(says(refusal(kBase, {"reward.reward_weights=[1,2]"}), {"each of the 1", "2"}));
  EXPECT_TRUE(says(refusal(kBase, {"model.dtype=float32", "model.kv_cache_dtype=fp8"}),
                   {"rounds nothing"}));
}

TEST(Config, WhatIsNotInThisVersionIsRefused) {
  for (const Unavailable& entry : unavailable_keys()) {
    std::string name = entry.name;
    if (name.ends_with(".*")) name.back() = 'x';
    const std::string value = entry.value.empty() ? "1" : entry.value;
    EXPECT_TRUE(
        says(refusal(kBase, {name + "=" + value}), {name, "not available in this version"}));
  }
  EXPECT_TRUE(says(refusal("[guard]\nmax_rollbacks = 3"), {":2", "not available"}));
  EXPECT_TRUE(says(refusal("[run]\nreport_to = [\"wandb\"]"), {"wandb", "not available"}));
  EXPECT_EQ(refusal(kBase + "[guard]"), "");
}

TEST(Config, TheTableIsWhole) {
  std::set<std::string> names;
  for (const Key& key : config_keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_TRUE(is_section(section_of(key.name))) << key.name;
    EXPECT_FALSE(key.meaning.empty() || key.owner.empty()) << key.name;
  }
  for (const Alias& alias : config_aliases()) {
    const auto refused = [&](const Unavailable& entry) { return entry.name == alias.name; };
    EXPECT_TRUE(alias.name.empty() || find_key(alias.name) != nullptr ||
                std::ranges::any_of(unavailable_keys(), refused))
        << alias.name;
  }
}

// The default of each key passes the key's own check, and no two keys share a place.
TEST(Config, EachKeyIsSetByItsOwnName) {
  TrainConfig c = parse_config(kBase, "c.toml");
  for (const Section& section : config_sections()) make_section(c, section.name);
  for (const Key& key : config_keys()) {
    TrainConfig changed = c;
    std::visit(
        [&]<class T>(T& (*field)(TrainConfig&)) {
          T& value = field(changed);
          if constexpr (std::is_same_v<T, bool>) {
            value = !value;
          } else if constexpr (std::is_arithmetic_v<T>) {
            value += 1;
          } else if constexpr (std::is_same_v<T, JsonObject>) {
            value.text = R"({"a":1})";
          } else {
            value.push_back({});
          }
        },
        key.field);
    EXPECT_FALSE(changed == c) << key.name;
    for (const Key& other : config_keys()) {
      EXPECT_EQ(print_value(other, changed) != print_value(other, c), other.name == key.name)
          << key.name << " against " << other.name;
    }
  }
}

TEST(Config, AMissingFileIsAUsageError) {
  EXPECT_THROW(read_config("/nowhere/x.toml"), UsageError);
  EXPECT_THROW(read_config("/tmp"), UsageError);
}

// OCTET_WRITE_DOCS=1 writes the page instead.
TEST(Config, TheDocumentationIsTheGenerators) {
  const std::string path = OCTET_SOURCE_DIR "/docs/configuration.md";
  if (std::getenv("OCTET_WRITE_DOCS") != nullptr) write_file_atomically(path, configuration_page());
  EXPECT_EQ(read_file(path), configuration_page())
      << "run this test with OCTET_WRITE_DOCS=1 to write the page anew";
}

}  // namespace
}  // namespace octet::loop
