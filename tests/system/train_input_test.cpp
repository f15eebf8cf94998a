// Configs and data that cannot be trained on: the exit code, a message that names the place, and no
// run folder left behind.
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "system/train_support.h"

namespace octet::test {
namespace {

namespace fs = std::filesystem;

class BadTraining : public testing::Test {
 protected:
  void refused(int exit_code, const Arguments& arguments, const std::vector<std::string>& words) {
    expect_message(trainer_.train("run", arguments), exit_code, words);
    EXPECT_FALSE(fs::exists(trainer_.path("run"))) << words[0];
    // The same without training.
    if (exit_code == 2) expect_message(trainer_.doctor(arguments), exit_code, words);
  }
  Trainer trainer_;
};

TEST_F(BadTraining, UnknownKeysAreAnswered) {
  refused(2, {"optim.learnin_rate=1e-3"}, {"optim.learnin_rate", "\"optim.learning_rate\""});
  refused(2, {"optim.num_generations=4"}, {"\"rollout.num_generations\""});
  refused(2, {"train.per_device_train_batch_size=4"}, {"TRL", "\"train.prompts_per_step\""});
  refused(2, {"actor_rollout_ref.rollout.n=4"}, {"verl", "\"rollout.num_generations\""});
  refused(2, {"model.load_in_4bit=true"}, {"Unsloth", "\"model.load_in_fp8\""});
  refused(2, {"algorithm.use_vllm=true"}, {"one program"});
  refused(2, {"algorithm.delta=3.0"}, {"algorithm.delta", "not available in this version"});
  refused(2, {"algorithm.loss_type=grop"}, {"\"grpo\""});
  const Trainer file("[optim]\nlearnin_rate = 1\n");
  expect_message(file.train("run"), 2, {file.config() + ":2", "\"optim.learning_rate\""});
  const Trainer no_toml("[optim\n");
  expect_message(no_toml.train("run"), 2, {no_toml.config() + ":1"});
  expect_message(octet({"train", "/nowhere/config.toml"}), 2, {"/nowhere/config.toml"});
}

TEST_F(BadTraining, ConflictingKeysAreNamed) {
  refused(2, {"model.load_in_fp8=block"}, {"model.load_in_fp8", "precision.flow"});
  refused(2, {"precision.flow=fp8_full", "model.load_in_fp8=false"}, {"granularity"});
  refused(2, {"precision.flow=fp8_lora"}, {"[lora]"});
  refused(2, {"precision.flow=fp8_full", "lora.r=4"}, {"[lora]", "fp8_full"});
  refused(2, {"clip.mode=calibrated"}, {"clip.mode", "bf16"});
  refused(2, {"lora.r=4"}, {"[lora]", "model.path"});
  refused(2, {"lora.lora_dropout=0.1"}, {"lora.lora_dropout"});
  refused(2, {"model.path=x"}, {"model.path", "model.init"});
  refused(2, {"data.train=x"}, {"data.train", "data.task"});
  refused(2, {"train.mini_batches=3"}, {"16", "train.mini_batches"});
  refused(2, {"reward.functions=[]"}, {"reward.functions", "reward.command"});
  refused(2, {"reward.functions=exact"}, {"exact_match"});
  refused(2, {"reward.pattern=("}, {"pattern"});
  refused(2, {"rollout.max_completion_length=16"}, {"max_completion_length", "max_seq_length"});
  refused(2, {"rollout.num_generations=1"}, {"num_generations"});
  refused(2, {"train.max_steps=0"}, {"train.max_steps"});
  refused(2, {"train.max_steps=9000000000000000000"}, {"train.max_steps"});
  refused(2, {"reward.timeout=1e300"}, {"reward.timeout"});
  refused(2, {"data.task_digits=4"}, {"data.task_digits"});
  refused(2, {"run.device=cuda"}, {"CUDA"});
  refused(2, kSft + Arguments{"reward.functions=[]", "train.eval_steps=2"}, {"train.eval_steps"});
}

// Training on JSON Lines with a model that has a tokenizer.
class BadRows : public testing::Test {
 protected:
  explicit BadRows(const std::string& chat_template = "")
      : model_("models/qwen3-tiny", chat_template),
        trainer_("[model]\npath = \"" + model_.path() + "\"\nmax_seq_length = 24\n" +
                 kTinyConfig.substr(kTinyConfig.find("[reward]"))) {}

  Arguments rows(const std::string& text, const Arguments& more = {}) const {
    write_text(trainer_.path("rows.jsonl"), text);
    return Arguments{"data.train=" + trainer_.path("rows.jsonl"), "train.max_steps=1"} + more;
  }
  void refused(const Arguments& arguments, const std::vector<std::string>& words) {
    expect_message(trainer_.train("run", arguments), 1, words);
    expect_message(trainer_.doctor(arguments), 1, words);
    EXPECT_FALSE(fs::exists(trainer_.path("run"))) << words[0];
  }
  TextModel model_;
  Trainer trainer_;
};

class BadChatRows : public BadRows {
 protected:
  BadChatRows()
      : BadRows(
            "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
            "{% endif %}{{ m.content }}{% endfor %}") {}
};

const std::string kGood = R"({"prompt":"1+2=","answer":"3"})"
                          "\n";

TEST_F(BadRows, FilesAndLines) {
  refused(rows(""), {"rows.jsonl", "at least one row"});
  refused({"data.train=/nowhere/rows.jsonl"}, {"/nowhere/rows.jsonl"});
  refused(rows(kGood + "{\"prompt\":\n"), {"rows.jsonl, line 2"});
  refused(rows(kGood + kGood + "[1]\n"), {"rows.jsonl, line 3"});
  refused(rows(kGood, {"data.eval=/nowhere/eval.jsonl"}), {"/nowhere/eval.jsonl"});
  refused(rows(kGood, {"data.chat_template=/nowhere/template"}), {"/nowhere/template"});
  refused(rows(kGood, {"model.path=/nowhere/model"}), {"/nowhere/model"});
  const std::string untouched = kGolden + "models/qwen3-tiny";
  refused(rows(kGood, {"model.path=" + untouched}), {"tokenizer.json"});
}

TEST_F(BadRows, Columns) {
  refused(rows(R"({"question":"1+2="})"
               "\n"),
          {"row 1", "\"prompt\"", "data.prompt_field"});
  refused(rows(kGood + R"({"promt":"1+2="})"
                       "\n"),
          {"row 2", "did you mean \"promt\""});
  refused(rows(kGood + R"({"prompt":7})"
                       "\n"),
          {"row 2", "7"});
  refused(rows(kGood + R"({"prompt":[]})"
                       "\n"),
          {"row 2", "[]"});
  refused(rows(R"({"prompt":""})"
               "\n"),
          {"row 1", "empty"});
  refused(rows(R"({"prompt":"1","solution":"2"})"
               "\n",
               {"reward.functions=numeric"}),
          {"row 1", "\"answer\"", "data.answer_field"});
  refused(rows(R"({"prompt":"1","completion":["x"]})"
               "\n",
               kSft),
          {"row 1", "completion"});
  refused(rows(R"({"prompt":"1"})"
               "\n",
               kSft),
          {"row 1", "data.completion_field"});
  refused(rows(R"({"prompt":[{"role":"user","content":"x"}]})"
               "\n"),
          {"row 1", "chat template"});
  // Without a token for it.
  const std::string foreign = kGood + "{\"prompt\":\"1\u00fc\",\"completion\":\"\u00fc\"}\n";
  refused(rows(foreign), {"rows.jsonl, row 2", "tokenizer.json"});
  refused(rows("{\"prompt\":\"1\",\"completion\":\"\u00fc\"}\n", kSft),
          {"rows.jsonl, row 1", "tokenizer.json"});
}

TEST_F(BadChatRows, Messages) {
  for (const char* messages : {"[7]", "[\"x\"]", "[{\"content\":\"x\"}]", "[{\"role\":7}]"}) {
    refused(rows(std::string(R"({"prompt":)") + messages + "}\n", {"data.system_prompt=S"}),
            {"row 1", "role"});
  }
  refused(rows(R"({"prompt":[{"role":"bad","content":"x"}]})"
               "\n"),
          {"row 1", "no such role"});
  for (const char* messages : {"7", "[]", "[7]", "[{\"role\":7}]", "[{\"role\":\"user\"}]",
                               "[{\"role\":\"assistant\",\"content\":\"x\"}]",
                               "[7,{\"role\":\"assistant\",\"content\":\"x\"}]"}) {
    refused(rows(std::string(R"({"messages":)") + messages + "}\n", kSft), {"row 1"});
  }
}

TEST_F(BadRows, LongPromptsAreLeftOutAndCounted) {
  const std::string long_row = "{\"prompt\":\"" + std::string(24, 'x') + "\"}\n";
  const Arguments one = rows(kGood + long_row, {"data.eval=" + trainer_.path("rows.jsonl")});
  const std::string run = trainer_.trained("fits", one);
  const Json data = Json::parse(read_text(run + "/provenance.json"))["data"];
  EXPECT_EQ(data["num_train"], 1);
  EXPECT_EQ(data["num_left_out"], 1);
  EXPECT_EQ(data["num_eval_left_out"], 1);
  EXPECT_TRUE(has_event(run, "rows_left_out", "1 rows to train on and 1 to evaluate on"));
  refused(rows(long_row), {"rows.jsonl", "all 1", "max_seq_length"});
  refused(rows(kGood, {"data.max_prompt_length=3"}), {"all 1", "max_prompt_length"});
  // 23 tokens leave room for one.
  const std::string almost =
      trainer_.trained("almost", rows("{\"prompt\":\"" + std::string(23, 'x') + "\"}\n"));
  EXPECT_EQ(values_of(almost, "completions/max_length"), std::vector<double>{1});
  // In SFT the whole text must fit, with its end token.
  refused(rows("{\"text\":\"" + std::string(24, 'x') + "\"}\n", kSft), {"all 1"});
  trainer_.trained("text", rows("{\"text\":\"" + std::string(23, 'x') + "\"}\n", kSft));
}

TEST_F(BadTraining, AFailureWhileLoadingLeavesNoFolder) {
  const TextModel model;
  const std::string weights = model.path() + "/model.safetensors";
  fs::resize_file(weights, fs::file_size(weights) - 100);
  const Trainer trainer("[model]\npath = \"" + model.path() + "\"\nmax_seq_length = 16\n" +
                        kTinyConfig.substr(kTinyConfig.find("[data]")));
  expect_message(trainer.train("run"), 1, {weights});
  EXPECT_FALSE(fs::exists(trainer.path("run")));
}

TEST_F(BadTraining, ThePlanMustFitTheMemory) {
  for (const Arguments& flow : {Arguments{}, kFp8Full, Arguments{"algorithm.beta=0.1"}}) {
    const auto limit = [](int64_t bytes) {
      return Arguments{"run.device_memory_limit=" + std::to_string(bytes)};
    };
    expect_message(trainer_.train("run", flow + limit(100000)), 1,
                   {"97.66 KiB", "KV pages", "total", "before the first token; what helps",
                    "a smaller model"});
    EXPECT_FALSE(fs::exists(trainer_.path("run")));
    // The smallest limit that the plan fits is enough.
    int64_t too_small = 100000, enough = 1 << 30;
    while (enough - too_small > 1) {
      const int64_t middle = too_small + (enough - too_small) / 2;
      (trainer_.doctor(flow + limit(middle)).exit_code == 0 ? enough : too_small) = middle;
    }
    expect_message(trainer_.train("run", flow + limit(too_small)), 1, {"what helps: "});
    const std::string run = trainer_.trained("run", flow + limit(enough));
    expect_equal_runs(run, trainer_.trained("free", flow));  // the limit changes no number
    fs::remove_all(run);
    fs::remove_all(trainer_.path("free"));
  }
}

}  // namespace
}  // namespace octet::test
