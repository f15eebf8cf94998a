// What the commands print, and how they read their input.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "system/program.h"
#include "text/tokenizer.h"

namespace octet::test {
namespace {

const std::string kModel = kGolden + "models/qwen3-tiny";

TEST(Commands, HelpAndVersion) {
  const Outcome version = octet({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.substr(0, 6), "octet ");
  for (const char* command :
       {"train", "generate", "score", "tokenize", "import", "doctor", "bench"}) {
    const Outcome help = octet({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_NE(help.out.find("Example:"), std::string::npos) << command;
    EXPECT_NE(octet({"--help"}).out.find(command), std::string::npos) << command;
  }
}

TEST(Commands, AHelpThatCannotBeWrittenIsAnError) {
  for (const char* arguments : {"--help", "--version", "train --help"}) {
    const Outcome outcome =
        run_program("/bin/sh", {"-c", std::string(OCTET_PROGRAM " ") + arguments + " > /dev/full"});
    EXPECT_EQ(outcome.exit_code, 1) << arguments;
    EXPECT_NE(outcome.err.find("[output]"), std::string::npos) << outcome.err;
  }
}

TEST(Commands, ScorePrintsATable) {
  const Outcome outcome = octet({"score", "--model", kModel, "--input", "-"}, ids_line({7, 8, 9}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("entropy"), std::string::npos);
  EXPECT_NE(outcome.out.find("perplexity"), std::string::npos);
}

TEST(Commands, OneTokenHasAnEntropyAndNoLogProbability) {
  const Outcome outcome =
      octet({"score", "--model", kModel, "--input", "-", "--json"}, ids_line({7}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.line(0)["logprobs"].dump(), "[null]");
  EXPECT_EQ(outcome.line(0)["entropies"].size(), 1u);
}

TEST(Commands, ScoreShowsTheLikeliestIds) {
  const Outcome outcome = octet(
      {"score", "--model", kModel, "--input", "-", "--json", "--top", "3"}, R"({"ids":[1,2,3]})");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json answer = outcome.line(0);
  ASSERT_EQ(answer["top"].size(), 3u);
  for (size_t t = 0; t < 3; ++t) {
    const Json& top = answer["top"][t];
    ASSERT_EQ(top.size(), 3u);
    EXPECT_GE(top[0][1].get<float>(), top[1][1].get<float>());
    EXPECT_GE(top[1][1].get<float>(), top[2][1].get<float>());
  }
  // Greedy decoding takes the first.
  const Outcome greedy = octet({"generate", "--model", kModel, "--input", "-", "--json",
                                "--temperature", "0", "--max-new-tokens", "1"},
                               R"({"ids":[1,2,3]})");
  ASSERT_EQ(greedy.exit_code, 0) << greedy.err;
  EXPECT_EQ(greedy.line(0)["ids"][0], answer["top"][2][0][0]);
  EXPECT_EQ(octet({"score", "--model", kModel, "--top", "-1", "x"}).exit_code, 2);
}

TEST(Commands, AShapeStandsForAModel) {
  const std::vector<std::string> prompts = {"--prompt-tokens", "5", "--prompts", "2"};
  const Arguments command = {"generate", "--shape",      "smollm2-135m", "--max-new-tokens",
                             "2",        "--ignore-eos", "--json"};
  const Outcome generated = octet(command + prompts);
  ASSERT_EQ(generated.exit_code, 0) << generated.err;
  EXPECT_EQ(generated.line(0)["ids"].size(), 2u);
  EXPECT_EQ(generated.line(1)["ids"].size(), 2u);
  const Outcome scored =
      octet({"score", "--shape", "smollm2-135m", "--input", "-", "--json"}, R"({"ids":[1,2,3]})");
  ASSERT_EQ(scored.exit_code, 0) << scored.err;
  EXPECT_EQ(scored.line(0)["logprobs"].size(), 3u);
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {"score", "text"},
           {"score", "--shape", "smollm2-135m", "--model", kModel, "text"},
           {"score", "--shape", "none", "text"},
           {"score", "--shape", "smollm2-135m", "--prompt-tokens", "-1"},
           {"score", "--shape", "smollm2-135m", "--prompt-tokens", "2", "text"}}) {
    EXPECT_EQ(octet(wrong).exit_code, 2) << ::testing::PrintToString(wrong);
  }
}

TEST(Commands, BenchRolloutKeepsItsPlan) {
  const Arguments small = {"--device", "cpu", "--shape", "smollm2-135m", "--layers", "1"};
  const Arguments rollout = {"bench",        "rollout", "--prompts", "2", "--prompt-tokens", "20",
                             "--new-tokens", "3",       "--repeat",  "3", "--batch-tokens",  "64",
                             "--remap"};
  const Outcome outcome = octet(rollout + small);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  for (const char* words :
       {"memory plan", "KV pages", "all equal: good", "next output equal", "allocator"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << outcome.out;
  }
  const TemporaryFolder folder;
  const Arguments load = Arguments{"bench", "load", "--folder", folder.path("model")} + small;
  for (int i = 0; i < 2; ++i) {  // made, then found
    const Outcome loaded = octet(load);
    ASSERT_EQ(loaded.exit_code, 0) << loaded.out << loaded.err;
    EXPECT_NE(loaded.out.find("good"), std::string::npos) << loaded.out;
  }
}

TEST(Commands, SeedsDecideSamples) {
  const auto sample = [](const std::string& seed) {
    const Outcome outcome = octet({"generate", "--model", kModel, "--input", "-", "--json", "--n",
                                   "2", "--seed", seed, "--max-new-tokens", "16", "--ignore-eos"},
                                  ids_line({1, 2, 3}));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string first = sample("1");
  EXPECT_EQ(sample("1"), first);
  EXPECT_NE(sample("2"), first);
  const Json completions = Json::parse(first)["completions"];
  ASSERT_EQ(completions.size(), 2u);
  EXPECT_NE(completions[0]["ids"], completions[1]["ids"]);
}

TEST(Commands, AnEndTokenStopsAndIsKept) {
  // The greedy first token as the end token: generation ends with it at once.
  const std::vector<std::string> command = {"generate", "--temperature",    "0", "--input", "-",
                                            "--json",   "--max-new-tokens", "5", "--model"};
  const auto with_model = [&](const std::string& model) {
    std::vector<std::string> arguments = command;
    arguments.push_back(model);
    return arguments;
  };
  std::vector<std::string> ignoring = with_model(kModel);
  ignoring.push_back("--ignore-eos");
  const std::vector<int32_t> free_run = ids(octet(ignoring, ids_line({1, 2, 3})).line(0)["ids"]);
  ASSERT_EQ(free_run.size(), 5u);

  const TemporaryFolder folder;
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::copy_file(kModel + "/" + name, folder.path(name));
  }
  write_text(folder.path("generation_config.json"),
             Json{{"eos_token_id", {511, free_run[0]}}}.dump());
  const Outcome stopped = octet(with_model(folder.path()), ids_line({1, 2, 3}));
  ASSERT_EQ(stopped.exit_code, 0) << stopped.err;
  EXPECT_EQ(ids(stopped.line(0)["ids"]), std::vector<int32_t>{free_run[0]});
  EXPECT_EQ(stopped.line(0)["finish_reason"], "stop");
}

// The tiny model with the letters a, b, c and a chat template that wants a content.
class Letters : public testing::Test {
 protected:
  Letters() {
    for (const char* name : {"config.json", "generation_config.json", "model.safetensors"}) {
      std::filesystem::copy_file(kModel + "/" + name, folder_.path(name));
    }
    write_text(folder_.path("tokenizer.json"), text::make_character_tokenizer("abc", {}));
    write_text(folder_.path("tokenizer_config.json"),
               Json{{"chat_template", "{{ messages[0].content + 'a' }}"}}.dump());
  }
  Arguments with_model(const std::string& command) const {
    return {command, command == "tokenize" ? "--tokenizer" : "--model", folder_.path(), "--json"};
  }
  TemporaryFolder folder_;
};

TEST_F(Letters, AStopTakesOneTextAndLeavesThePrompt) {
  const Arguments command = with_model("generate") + Arguments{"--max-new-tokens", "3"};
  const Outcome before = octet(command + Arguments{"--stop", "a", "--stop", "b", "abc", "cab"});
  EXPECT_EQ(before.exit_code, 0) << before.err;
  EXPECT_EQ(before.lines().size(), 2u);
  const Outcome behind = octet(command + Arguments{"abc", "cab", "--stop", "a", "--stop", "b"});
  EXPECT_EQ(before.out, behind.out);
}

TEST_F(Letters, AnErrorOfATextNamesItsLine) {
  const std::string lines =
      "{\"text\":\"abc\"}\n{\"text\":\"abd\"}\n"
      "{\"messages\":[{\"role\":\"user\"}]}\n"
      "{\"messages\":[{\"role\":\"user\",\"content\":\"d\"}]}\n";
  for (const char* command : {"generate", "score", "tokenize"}) {
    const Outcome outcome = octet(with_model(command) + Arguments{"--input", "-"}, lines);
    EXPECT_EQ(outcome.exit_code, 1);
    ASSERT_EQ(outcome.lines().size(), 4u);
    EXPECT_TRUE(outcome.line(0).contains("ids")) << command;
    for (const size_t bad : {1, 2, 3}) {
      const std::string error = outcome.line(bad)["error"];
      EXPECT_EQ(error.find("[standard input, line " + std::to_string(bad + 1) + "] "), 0u)
          << command << ": " << error;
      EXPECT_NE(error.find(folder_.path()), std::string::npos) << error;  // whose rule it is
    }
  }
}

TEST(Commands, ASignalStopsTheWork) {
  // Minutes of work, and one second until the signal: one, for the second would end the program
  // (in the background `timeout` signals its whole group too).
  const Outcome outcome =
      run_program("timeout",
                  {"--foreground", "--preserve-status", "--signal=INT", "1", OCTET_PROGRAM,
                   "generate", "--model", kModel, "--n", "2000", "--ignore-eos", "--max-new-tokens",
                   "400", "--input", "-", "--json"},
                  ids_line({1, 2, 3}));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  EXPECT_NE(outcome.err.find("stopped on request"), std::string::npos) << outcome.err;
}

class Tokenize : public testing::Test {
 protected:
  Tokenize() {
    const std::vector<std::string> special = {"<end>"};
    write_text(file_, text::make_character_tokenizer("abc ", special));
  }
  Outcome run(const Arguments& more, const std::string& input) const {
    return octet(Arguments{"tokenize", "--tokenizer", file_, "--input", "-"} + more, input);
  }
  TemporaryFolder folder_;
  std::string file_ = folder_.path("tokenizer.json");
};

TEST_F(Tokenize, TextAndIdsBothWays) {
  const Outcome outcome =
      run({"--json"}, "{\"text\":\"cab <end>\"}\n{\"ids\":[2,0,1,4]}\n{\"ids\":[9]}\n");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(ids(outcome.line(0)["ids"]), (std::vector<int32_t>{2, 0, 1, 3, 4}));
  EXPECT_EQ(outcome.line(1)["text"], "cab<end>");
  EXPECT_TRUE(outcome.line(2).contains("error"));
  EXPECT_EQ(run({"--json", "--skip-special-tokens"}, "{\"ids\":[2,0,4]}").line(0)["text"], "ca");
  EXPECT_EQ(run({}, "{\"text\":\"cab\"}").out, "2 0 1\n");
}

TEST_F(Tokenize, ArgumentsAreTextsAsTheyStand) {
  write_text(file_, text::make_character_tokenizer("[,]a-trin ", {}));
  const auto run = [&](const Arguments& texts) {
    return octet(Arguments{"tokenize", "--tokenizer", file_} + texts).out;
  };
  EXPECT_EQ(run({"[a,a]", "[a", "train"}), "0 3 1 3 2\n0 3\n5 6 3 7 8\n");
  EXPECT_EQ(run({"--", "-a"}), "4 3\n");
}

TEST_F(Tokenize, ConversationsThroughATemplate) {
  write_text(folder_.path("template.jinja"),
             "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
             "{% if add_generation_prompt %}{{ prefix }}{% endif %}");
  const std::vector<std::string> arguments = {"--json", "--chat-template",
                                              folder_.path("template.jinja")};
  const std::string messages = R"("messages":[{"role":"user","content":"ab"}])";
  const Outcome outcome =
      run(arguments, "{" + messages + "}\n{" + messages +
                         R"(,"add_generation_prompt":true,"kwargs":{"prefix":"c"}})" + "\n{" +
                         messages + R"(,"kwargs":{"prefix":"a","add_generation_prompt":true}})");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.line(0)["text"], "ab<end>");
  EXPECT_EQ(ids(outcome.line(0)["ids"]), (std::vector<int32_t>{0, 1, 4}));
  EXPECT_EQ(outcome.line(1)["text"], "ab<end>c");
  EXPECT_EQ(outcome.line(2)["text"], "ab<end>a");
  EXPECT_EQ(run({"--json"}, "{" + messages + "}").exit_code, 1);  // no template
  const Outcome empty = run(arguments, R"({"messages":[]})");
  EXPECT_EQ(empty.exit_code, 1);
  EXPECT_NE((empty.out + empty.err).find("at least one message"), std::string::npos) << empty.err;
}

TEST_F(Tokenize, GoldenChatTemplateOfQwen3) {
  const Json golden = Json::parse(read_text(kGolden + "chat_template/qwen3.json"));
  write_text(folder_.path("template.jinja"), golden["chat_template"].get<std::string>());
  // Characters of the conversations need not be in the vocabulary, but the text must be rendered:
  // a tokenizer of all of them.
  std::string characters;
  for (char c = ' '; c <= '~'; ++c) characters += c;
  write_text(file_, text::make_character_tokenizer(characters + "\n\t", {}));
  size_t compared = 0;
  for (const Json& entry : golden["cases"]) {
    const std::string expected = entry["text"];
    if (std::ranges::any_of(expected, [](unsigned char c) { return c >= 128; })) continue;
    const Json line = {{"messages", entry["messages"]}, {"kwargs", entry["kwargs"]}};
    const Outcome outcome =
        run({"--json", "--chat-template", folder_.path("template.jinja")}, line.dump());
    ASSERT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
    EXPECT_EQ(outcome.line(0)["text"], expected);
    ++compared;
  }
  EXPECT_GE(compared, 4u);
}

TEST(Commands, DoctorNamesTheDevice) {
  const Outcome outcome = octet({"doctor", "--cpu-isa", "portable", "--threads", "1"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* word : {"octet ", "portable", "threads:          1", "nlohmann-json"}) {
    EXPECT_NE(outcome.out.find(word), std::string::npos) << outcome.out;
  }
}

TEST(Commands, DoctorChecksAConfigWithoutTraining) {
  const TemporaryFolder folder;
  write_text(folder.path("train.jsonl"), "{\"prompt\":\"x\",\"answer\":\"1\"}\n");
  const std::string config = "[model]\npath = \"" + kModel +
                             "\"\nmax_seq_length = 128\n[data]\ntask = \"arithmetic\"\n"
                             "[run]\ndir = \"" +
                             folder.path("run") + "\"\n";
  write_text(folder.path("run.toml"), config);
  const Outcome unknown = octet({"doctor", folder.path("run.toml"), "train.max_stps=3"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("max_steps"), std::string::npos) << unknown.err;

  const Outcome demo =
      octet({"doctor", OCTET_SOURCE_DIR "/recipes/demo-sft.toml", "run.dir=" + folder.path("run")});
  EXPECT_EQ(demo.exit_code, 0) << demo.err;
  for (const char* word : {"[model]", "data:", "memory plan:", "total"}) {
    EXPECT_NE(demo.out.find(word), std::string::npos) << demo.out;
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("run")));
}

TEST(Commands, BenchGemmKnowsItsWord) {
  const Outcome outcome = octet({"bench", "memory"});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("gemm"), std::string::npos);
}

}  // namespace
}  // namespace octet::test
