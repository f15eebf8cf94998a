// The real SmolLM2-135M-Instruct, from the GGUF of a PyPI wheel to log-probabilities and text.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "system/program.h"

namespace octet::test {
namespace {

constexpr float kTolerance = 1e-4f;
// Logits agree to about 1e-4; where two are nearer than this, either may win.
constexpr double kSmallestGap = 0.01;

std::string jsonl(const std::vector<Json>& lines) {
  std::string text;
  for (const Json& line : lines) text += line.dump() + "\n";
  return text;
}

void check_tokenizer(const std::string& model) {
  const Json golden = Json::parse(read_text(kGolden + "smollm2/tokenizer.json"));
  std::vector<Json> texts, encoded;
  for (const Json& row : golden) {
    texts.push_back({{"text", row["text"]}});
    encoded.push_back({{"ids", row["ids"]}});
  }
  const std::vector<std::string> command = {"tokenize", "--tokenizer", model,
                                            "--input",  "-",           "--json"};
  const Outcome ids_outcome = octet(command, jsonl(texts));
  const Outcome text_outcome = octet(command, jsonl(encoded));
  ASSERT_EQ(ids_outcome.exit_code, 0) << ids_outcome.out;
  ASSERT_EQ(text_outcome.exit_code, 0) << text_outcome.out;
  for (size_t i = 0; i < golden.size(); ++i) {
    EXPECT_EQ(ids_outcome.line(i)["ids"], golden[i]["ids"]) << golden[i]["text"];
    EXPECT_EQ(text_outcome.line(i)["text"], golden[i]["decoded"]);
  }

  const Json chat = Json::parse(read_text(kGolden + "smollm2/chat_template.json"));
  std::vector<Json> conversations;
  for (const Json& entry : chat["cases"]) {
    conversations.push_back({{"messages", entry["messages"]}, {"kwargs", entry["kwargs"]}});
  }
  const Outcome chat_outcome = octet(command, jsonl(conversations));
  ASSERT_EQ(chat_outcome.exit_code, 0) << chat_outcome.out;
  for (size_t i = 0; i < conversations.size(); ++i) {
    EXPECT_EQ(chat_outcome.line(i)["text"], chat["cases"][i]["text"]);
    EXPECT_EQ(chat_outcome.line(i)["ids"], chat["cases"][i]["ids"]);
  }
}

void check_scores(const std::string& model, const Json& golden) {
  std::vector<Json> lines;
  for (const Json& entry : golden) {
    if (entry.contains("text")) {
      lines.push_back({{"text", entry["text"]}});
    } else {
      lines.push_back({{"messages", entry["messages"]}, {"add_generation_prompt", true}});
    }
  }
  const Outcome outcome = octet(
      {"score", "--model", model, "--dtype", "float32", "--input", "-", "--json"}, jsonl(lines));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err << outcome.out;
  for (size_t i = 0; i < golden.size(); ++i) {
    const Json answer = outcome.line(i);
    ASSERT_EQ(answer["ids"], golden[i]["ids"]);
    for (const char* key : {"logprobs", "entropies"}) {
      const std::vector<float> got = floats(answer[key]);
      const std::vector<float> expected = floats(golden[i][key]);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t t = key[0] == 'l' ? 1 : 0; t < got.size(); ++t) {
        ASSERT_NEAR(got[t], expected[t], kTolerance) << key << " " << i << " " << t;
      }
    }
  }
}

void check_greedy(const std::string& model, const Json& golden) {
  std::vector<Json> lines;
  std::vector<Json> expected;
  for (const Json& entry : golden) {
    if (!entry.contains("greedy") || entry["smallest_gap"].get<double>() < kSmallestGap) continue;
    lines.push_back({{"messages", entry["messages"]}});
    expected.push_back(entry);
  }
  ASSERT_FALSE(lines.empty());
  const Outcome outcome =
      octet({"generate", "--model", model, "--dtype", "float32", "--temperature", "0",
             "--max-new-tokens", "32", "--input", "-", "--json"},
            jsonl(lines));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err << outcome.out;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(outcome.line(i)["ids"], expected[i]["greedy"]);
    EXPECT_EQ(outcome.line(i)["text"], expected[i]["greedy_text"]);
  }
}

// One small step of the recipe that `./run demo --model smollm2` runs, and its adapter in use.
void check_training(const std::string& model, const std::string& run) {
  const std::string source = OCTET_SOURCE_DIR;
  const Outcome trained =
      octet({"train", source + "/recipes/smollm2-gsm8k.toml", "model.path=" + model,
             "data.train=" + source + "/recipes/data/gsm8k-style.jsonl", "run.dir=" + run,
             "train.max_steps=1", "train.prompts_per_step=1", "rollout.num_generations=2",
             "rollout.max_completion_length=8", "reward.functions=[\"length\"]",
             "reward.reward_weights=[1.0]", "reward.soft_punish_cache=8"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const Json metrics = Json::parse(read_text(run + "/metrics.jsonl"));
  EXPECT_EQ(metrics["step"], 1);
  EXPECT_EQ(metrics["train_rollout_logprob_abs_diff_max"], 0);
  EXPECT_EQ(metrics["num_updates"], 2);
  const Outcome generated =
      octet({"generate", "--model", model, "--adapter", run + "/adapter", "--flow", "fp8_lora",
             "--load-in-fp8", "channel", "--kv-cache-dtype", "fp8", "--max-new-tokens", "4",
             "--ignore-eos", "--input", "-", "--json"},
            R"({"messages":[{"role":"user","content":"What is 2+2?"}]})");
  ASSERT_EQ(generated.exit_code, 0) << generated.err;
  EXPECT_EQ(generated.line(0)["ids"].size(), 4u);
}

TEST(SmolLM2, ImportedModelEqualsItsReference) {
  const std::string source = OCTET_SOURCE_DIR;
  const Outcome fetch = run_program(source + "/tools/fetch_smollm2.sh", {});
  if (fetch.exit_code != 0) GTEST_SKIP() << "SmolLM2 cannot be fetched: " << fetch.err;
  const std::string gguf = fetch.out.substr(0, fetch.out.find('\n'));
  const TemporaryFolder folder;
  const std::string model = folder.path("smollm2");
  const Outcome import = octet({"import", gguf, model});
  ASSERT_EQ(import.exit_code, 0) << import.err;
  ASSERT_EQ(octet({"import", gguf, model}).exit_code, 1);  // it is there already

  check_tokenizer(model);
  const Json golden = Json::parse(read_text(kGolden + "smollm2/scores.json"));
  check_scores(model, golden);
  check_greedy(model, golden);
  check_training(model, folder.path("run"));
}

}  // namespace
}  // namespace octet::test
