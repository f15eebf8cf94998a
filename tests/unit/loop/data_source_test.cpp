#include "loop/data_source.h"

#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "unit/io/test_files.h"

namespace octet::loop {
namespace {

using io::error_of;
using io::expect_contains;

const std::string kTemplate =
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if short %}!{% endif %}{% endif %}";

TextSide make_text_side(bool with_template) {
  std::string characters = "\n";
  for (char c = ' '; c <= '~'; ++c) characters += c;
  TextSide side;
  side.tokenizer = text::Tokenizer::from_json(
      text::make_character_tokenizer(characters, std::vector<std::string>{"<|end|>"}), "test");
  side.stop_ids = {96};
  if (with_template) side.chat_template = text::ChatTemplate::parse(kTemplate, "test");
  return side;
}

class DataSourceTest : public ::testing::Test {
 protected:
  DataSource& read(const std::string& lines, const std::string& extra = "",
                   bool with_template = false, const std::string& head = "") {
    folder_.write("train.jsonl", lines);
    config_ = parse_config(
        "[model]\npath = \"m\"\nmax_seq_length = 64\n[data]\ntrain = \"" +
            folder_.path("train.jsonl") + "\"\nshuffle = false\n" + head +
            "\n[rollout]\nmax_completion_length = 8\n[reward]\nfunctions = [\"exact_match\"]\n" +
            extra,
        "c.toml");
    text_side_ = make_text_side(with_template);
    source_.emplace(config_, text_side_);
    return *source_;
  }
  std::string text_of(const std::vector<int32_t>& ids) const {
    return text_side_.tokenizer->decode(ids);
  }

  io::TempFolder folder_;
  TrainConfig config_;
  TextSide text_side_;
  std::optional<DataSource> source_;
};

TEST_F(DataSourceTest, PlainPromptsKeepTheirOtherColumns) {
  DataSource& data = read(R"({"prompt": "a?", "answer": "1", "level": 3}
{"prompt": "b?", "answer": "2"}
)",
                          "[train]\nprompts_per_step = 3\n", false, "system_prompt = \"Be good.\"");
  EXPECT_EQ(data.num_train(), 2);
  EXPECT_EQ(data.prompt(0, 0).text, "Be good.\na?");
  EXPECT_EQ(text_of(data.prompt(0, 0).ids), "Be good.\na?");
  EXPECT_EQ(data.prompt(0, 0).columns->dump(), R"({"answer":"1","level":3})");
  // Row by row without shuffling, over the end of an epoch.
  EXPECT_EQ(data.prompt(0, 2).text, data.prompt(0, 0).text);
  EXPECT_EQ(data.prompt(1, 0).text, data.prompt(0, 1).text);
}

TEST_F(DataSourceTest, ConversationsGoThroughTheTemplate) {
  DataSource& data = read(
      R"({"q": "one", "answer": "1"}
{"q": [{"role": "system", "content": "S"}, {"role": "user", "content": "two"}], "answer": "2"}
)",
      "", true,
      "prompt_field = \"q\"\nsystem_prompt = \"P\"\nchat_template_kwargs = { short = true }");
  EXPECT_EQ(data.prompt(0, 0).text, "[system]P\n[user]one\n[assistant]!");
  EXPECT_EQ(data.prompt(0, 1).text, "[system]S\n[user]two\n[assistant]!");  // the row's own wins
  EXPECT_EQ(text_of(data.prompt(0, 1).ids), data.prompt(0, 1).text);
}

TEST_F(DataSourceTest, DemonstrationsLearnTheCompletionAndTheEnd) {
  const std::string sft = "[algorithm]\nname = \"sft\"\n[train]\nprompts_per_step = 4\n";
  DataSource& data = read(
      R"({"prompt": "Q:", "completion": " A"}
{"text": "just text"}
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}
)",
      sft, true, "system_prompt = \"P\"");
  const auto parts = [&](int64_t index) {
    const DemonstrationRow row = data.demonstration(0, index);
    const std::vector<int32_t> prompt(row.ids.begin(), row.ids.begin() + row.first_target);
    const std::vector<int32_t> rest(row.ids.begin() + row.first_target, row.ids.end());
    return std::pair(text_of(prompt), text_of(rest));
  };
  using Parts = std::pair<std::string, std::string>;
  EXPECT_EQ(parts(0), (Parts{"[system]P\n[user]Q:\n[assistant]", " A<|end|>"}));
  EXPECT_EQ(parts(1), (Parts{"j", "ust text<|end|>"}));  // the first token has nothing before it
  EXPECT_EQ(parts(3), (Parts{"[system]P\n[user]x\n[assistant]", "y<|end|>"}));
}

// A demonstration's prompt is what a rollout of the same question would be given.
TEST_F(DataSourceTest, MessagesAreRenderedLikePrompts) {
  DataSource& data = read(
      R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
)",
      "[algorithm]\nname = \"sft\"\n", true, "system_prompt = \"P\"");
  const DemonstrationRow row = data.demonstration(0, 0);
  EXPECT_EQ(text_of(row.ids), "[system]P\n[user]hi\n[assistant]yo\n");
  EXPECT_EQ(row.first_target, 30);
  // Without completion_only_loss all but the first token is learnt.
  read(R"({"prompt": "Q:", "completion": " A"})",
       "[algorithm]\nname = \"sft\"\ncompletion_only_loss = false\n");
  EXPECT_EQ(source_->demonstration(0, 0).first_target, 1);
}

TEST_F(DataSourceTest, WhatIsTooLongIsLeftOutAndCounted) {
  const std::string rows = R"({"prompt": "short", "answer": "1"}
{"prompt": "this one has twenty-six", "answer": "2"}
{"prompt": "0123456789012345678901234567890123456789012345678901234567890123", "answer": "3"}
)";
  EXPECT_EQ(read(rows).num_left_out(), 1);  // 64 tokens leave no room within 64
  DataSource& data = read(rows, "", false, "max_prompt_length = 5");
  EXPECT_EQ(data.num_train(), 1);
  EXPECT_EQ(data.num_left_out(), 2);
  expect_contains(error_of([&] { read(rows, "", false, "max_prompt_length = 4"); }), "all 3");
  const std::string sft = "[algorithm]\nname = \"sft\"\n";
  const std::string completions = R"({"prompt": "q", "completion": "a"}
{"prompt": "0123456789", "completion": "0123456789012345678901234567890123456789012345678901234"}
)";
  EXPECT_EQ(read(completions, sft).num_left_out(), 1);
}

TEST_F(DataSourceTest, AMissingColumnNamesTheNearest) {
  const std::string message = error_of([&] { read("{\"prompts\": \"a\", \"answer\": \"1\"}\n"); });
  expect_contains(message, "row 1");
  expect_contains(message, "\"prompt\"");
  expect_contains(message, "did you mean \"prompts\"");
  expect_contains(error_of([&] {
                    read("{\"prompt\": \"a\", \"completions\": \"b\"}\n",
                         "[algorithm]\nname = \"sft\"\n");
                  }),
                  "did you mean \"completions\"");
}

TEST_F(DataSourceTest, MalformedRowsAreErrorsThatNameTheRow) {
  const std::string good = "{\"prompt\": \"a\", \"answer\": \"1\"}\n";
  for (const char* prompt : {"5", "null", "{}", "[]", "[\"text\"]", "[{\"content\": \"x\"}]",
                             "[{\"role\": 5, \"content\": \"x\"}]", "\"\""}) {
    const std::string row = std::string("{\"answer\": \"1\", \"prompt\": ") + prompt + "}\n";
    expect_contains(error_of([&] { read(good + row); }), "row 2");
  }
  for (const char* messages :
       {"5", "[]", "[\"text\"]", "[{\"role\": \"user\", \"content\": \"x\"}]", "[5, 6]",
        "[{\"role\": \"assistant\", \"content\": \"x\"}]"}) {
    const std::string row = std::string("{\"messages\": ") + messages + "}\n";
    expect_contains(error_of([&] { read(row, "[algorithm]\nname = \"sft\"\n", true); }), "row 1");
  }
  for (const char* completion : {"5", "[]", "[\"x\"]", "[{\"content\": 5}]"}) {
    const std::string row =
        std::string("{\"prompt\": \"q\", \"completion\": ") + completion + "}\n";
    expect_contains(error_of([&] { read(row, "[algorithm]\nname = \"sft\"\n"); }), "row 1");
  }
  // A conversation without a template.
  expect_contains(
      error_of([&] {
        read("{\"prompt\": [{\"role\": \"user\", \"content\": \"x\"}], \"answer\": \"\"}\n");
      }),
      "chat template");
}

TEST_F(DataSourceTest, EpochsAreShuffledEachInItsOwnOrder) {
  std::string rows;
  for (int i = 0; i < 10; ++i) {
    rows += "{\"prompt\": \"" + std::to_string(i) + "\", \"answer\": \"\"}\n";
  }
  read(rows, "[train]\nprompts_per_step = 5\n");
  config_.data.shuffle = true;
  const auto epoch = [&](DataSource& data, int64_t number) {
    std::string order;
    for (int64_t i = 0; i < 10; ++i) order += data.prompt(2 * number + i / 5, i % 5).text;
    return order;
  };
  DataSource a(config_, text_side_), b(config_, text_side_);
  const std::string first = epoch(a, 0), second = epoch(a, 1);
  EXPECT_NE(first, second);
  EXPECT_EQ(std::set<char>(first.begin(), first.end()).size(), 10u);
  EXPECT_EQ(epoch(b, 1), second);  // whatever was asked for before
  EXPECT_EQ(epoch(b, 0), first);
  config_.run.seed = 43;
  DataSource c(config_, text_side_);
  EXPECT_NE(epoch(c, 0), first);
}

TEST(DataSource, TheTaskBringsPromptsAnswersAndDemonstrations) {
  TrainConfig config = parse_config(R"([model]
max_seq_length = 32
init = { hidden_size = 32 }
[data]
task = "arithmetic"
task_digits = 1
task_eval_size = 10
max_eval_samples = 4
task_wrong_share = 0.5
[train]
max_steps = 1
[reward]
functions = ["exact_match"]
[algorithm]
name = "sft"
)",
                                    "c.toml");
  TextSide side;
  side.tokenizer = text::Tokenizer::from_json(ArithmeticTask::tokenizer_json(), "task");
  side.stop_ids = {ArithmeticTask::kEosId};
  DataSource data(config, side);
  EXPECT_EQ(data.num_train(), 90);
  EXPECT_EQ(data.eval().size(), 4u);
  const PromptRow& row = data.prompt(0, 0);
  EXPECT_TRUE(row.columns->contains("answer"));
  const DemonstrationRow demonstration = data.demonstration(0, 0);
  EXPECT_EQ(demonstration.first_target, static_cast<int64_t>(row.ids.size()));
  EXPECT_EQ(demonstration.ids.back(), ArithmeticTask::kEosId);
  EXPECT_EQ(data.demonstration(0, 0).ids, demonstration.ids);
}

}  // namespace
}  // namespace octet::loop
