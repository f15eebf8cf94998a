#include "reward/external_command.h"

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/strings.h"
#include "unit/reward/reward_batch.h"

namespace octet::reward {
namespace {

using std::chrono::milliseconds;

class ExternalCommandTest : public testing::Test {
 protected:
  ExternalCommandTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("octet_reward_" + std::to_string(getpid()) + "_" +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(folder_);
    batch_.add("four", {{"answer", "4"}, {"level", 1}});
    batch_.add("five \"quoted\"\n", {{"answer", "5"}});
  }
  ~ExternalCommandTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::unique_ptr<ExternalCommand> command(std::string text, int timeout_ms = 10000,
                                                  int max_restarts = 10) {
    return std::make_unique<ExternalCommand>(
        ExternalCommandOptions{std::move(text), milliseconds(timeout_ms), max_restarts});
  }
  // Answers every line with `answer`.
  static std::string always(const std::string& answer) {
    return "while read -r line; do printf '%s\\n' '" + answer + "'; done";
  }
  void expect_no_rewards(ExternalCommand& reward) {
    const std::vector<float> rewards = reward.score(batch_.view());
    ASSERT_EQ(rewards.size(), 2u);
    for (const float value : rewards) EXPECT_TRUE(std::isnan(value));
  }

  std::filesystem::path folder_;
  OwnedBatch batch_;
};

TEST_F(ExternalCommandTest, OneProgramForAllBatches) {
  const auto reward = command("echo x >> " + path("starts") +
                              "; while read -r line; do printf '%s\\n' \"$line\" >> " +
                              path("requests") + R"(; echo '{"rewards":[0.5,null]}'; done)");
  for (int i = 0; i < 3; ++i) {
    const std::vector<float> rewards = reward->score(batch_.view());
    EXPECT_EQ(rewards.at(0), 0.5f);
    EXPECT_TRUE(std::isnan(rewards.at(1)));
  }
  EXPECT_EQ(reward->failures().num_failed_samples, 0);  // null is an answer
  EXPECT_EQ(read_file(path("starts")), "x\n");
  const std::string requests = read_file(path("requests"));
  const Json request = parse_json(split(requests, '\n').at(0), "request");
  EXPECT_EQ(request.at("prompts"), (Json{"question 0", "question 1"}));
  EXPECT_EQ(request.at("completions"), (Json{"four", "five \"quoted\"\n"}));
  EXPECT_EQ(request.at("completion_ids"), Json::parse("[[7,7,7],[7,7,7]]"));
  EXPECT_EQ(request.at("answer"), (Json{"4", "5"}));
  EXPECT_EQ(request.at("level"), Json::parse("[1,null]"));
}

TEST_F(ExternalCommandTest, EmptyBatchAsksNobody) {
  EXPECT_TRUE(command("exit 1")->score({}).empty());
}

TEST_F(ExternalCommandTest, LinesLargerThanAPipe) {
  OwnedBatch large;
  for (int i = 0; i < 200; ++i) large.add(std::string(5000, 'x'));
  std::string zeros = "0";
  for (int i = 1; i < 200; ++i) zeros += ",0";
  const auto reward = command(always("{\"rewards\":[" + zeros + "]}"));
  EXPECT_EQ(reward->score(large.view()), std::vector<float>(200, 0.0f));
}

TEST_F(ExternalCommandTest, BrokenUtf8IsSent) {
  OwnedBatch batch;
  batch.add("\xff\xc3");
  EXPECT_EQ(command(always("{\"rewards\":[1]}"))->score(batch.view()).at(0), 1);
}

TEST_F(ExternalCommandTest, TimeOutIsCountedAndTheNextBatchGoesOn) {
  // Hangs on its first start and answers on its second.
  const auto reward =
      command("if test -e " + path("again") + "; then " + always("{\"rewards\":[1,2]}") +
                  "; else touch " + path("again") + "; sleep 100; fi",
              300);
  const auto begin = std::chrono::steady_clock::now();
  expect_no_rewards(*reward);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3000));
  EXPECT_EQ(reward->failures().num_timeouts, 1);
  EXPECT_EQ(reward->failures().num_failed_samples, 2);
  EXPECT_EQ(reward->score(batch_.view()), (std::vector<float>{1, 2}));
}

TEST_F(ExternalCommandTest, TimeOutWhileNobodyReads) {
  OwnedBatch large;
  large.add(std::string(1 << 20, 'x'));  // more than a pipe holds
  const auto reward = command("sleep 100", 300);
  EXPECT_TRUE(std::isnan(reward->score(large.view()).at(0)));
  EXPECT_EQ(reward->failures().num_timeouts, 1);
}

TEST_F(ExternalCommandTest, CrashSaysHow) {
  const auto reward = command("read -r line; exit 3");
  expect_no_rewards(*reward);
  EXPECT_EQ(reward->failures().num_crashes, 1);
  EXPECT_NE(reward->failures().last_reason.find("exit code 3"), std::string::npos);
  const auto killed = command("read -r line; kill -9 $$");
  expect_no_rewards(*killed);
  EXPECT_NE(killed->failures().last_reason.find("signal 9"), std::string::npos);
}

TEST_F(ExternalCommandTest, WriteToAProgramThatIsGone) {
  OwnedBatch large;
  large.add(std::string(1 << 20, 'x'));
  const auto reward = command("exec <&-; sleep 0.2");  // SIGPIPE must not end us
  EXPECT_TRUE(std::isnan(reward->score(large.view()).at(0)));
  EXPECT_EQ(reward->failures().num_crashes, 1);
}

TEST_F(ExternalCommandTest, GivesUpAfterRestartsInARow) {
  const auto reward = command("echo x >> " + path("starts") + "; read -r line; exit 1", 10000, 2);
  for (int i = 0; i < 6; ++i) expect_no_rewards(*reward);
  EXPECT_EQ(read_file(path("starts")), "x\nx\nx\n");  // one start and two restarts
  EXPECT_EQ(reward->failures().num_crashes, 6);
  EXPECT_EQ(reward->failures().num_failed_samples, 12);
  EXPECT_NE(reward->failures().last_reason.find("given up"), std::string::npos);
  EXPECT_TRUE(reward->failures().given_up);
}

TEST_F(ExternalCommandTest, AProgramThatEndsAfterEachAnswerIsStartedAgain) {
  const auto reward = command("read -r line; echo '{\"rewards\":[1,2]}'", 10000, 2);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(reward->score(batch_.view()), (std::vector<float>{1, 2}));
    std::this_thread::sleep_for(milliseconds(50));
  }
}

TEST_F(ExternalCommandTest, BadAnswers) {
  for (const char* answer :
       {"{\"rewards\":[1]}", "{\"rewards\":[1,2,3]}", "{\"rewards\":1}", "{\"scores\":[1,2]}",
        "[1,2]", "hello", "", "{\"rewards\":[1,2]", "{\"rewards\":[1,1e999]}"}) {
    SCOPED_TRACE(answer);
    const auto reward = command(always(answer));
    expect_no_rewards(*reward);
    EXPECT_EQ(reward->failures().num_bad_answers, 1);
    EXPECT_EQ(reward->failures().num_failed_samples, 2);
    EXPECT_FALSE(reward->failures().last_reason.empty());
  }
}

TEST_F(ExternalCommandTest, BadValuesCostOnlyTheirSamples) {
  for (const char* value : {"NaN", "Infinity", "-Infinity", "\"1\"", "true", "[1]", "1e39"}) {
    SCOPED_TRACE(value);
    const auto reward =
        command(always(std::string("{\"note\":\"NaN \\\"\",\"rewards\":[") + value + ",1]}"));
    const std::vector<float> rewards = reward->score(batch_.view());
    EXPECT_TRUE(std::isnan(rewards.at(0)));
    EXPECT_EQ(rewards.at(1), 1);
    EXPECT_EQ(reward->failures().num_bad_values, 1);
    EXPECT_EQ(reward->failures().num_failed_samples, 1);
  }
}

// A line too many would be taken for the next batch's answer.
TEST_F(ExternalCommandTest, StrayOutputDoesNotShiftTheAnswers) {
  const auto reward = command(
      "n=0; while read -r line; do n=$((n+1)); printf '{\"rewards\":[%s,0]}\\nstray\\n' $n; done");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(reward->score(batch_.view()), (std::vector<float>{1, 0}));  // started anew
    std::this_thread::sleep_for(milliseconds(20));
  }
}

TEST_F(ExternalCommandTest, TheWholeGroupEndsWithTheReward) {
  {
    const auto reward =
        command("sleep 1000 & echo $! > " + path("pid") + "; " + always("{\"rewards\":[1,2]}"));
    EXPECT_EQ(reward->score(batch_.view()), (std::vector<float>{1, 2}));
  }
  const int pid = std::stoi(read_file(path("pid")));
  // The orphan is reaped by init some time after; a zombie is as good as gone.
  bool gone = false;
  for (int i = 0; i < 100 && !gone; ++i) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string id, name, state;
    gone = !(stat >> id >> name >> state) || state == "Z";
    if (!gone) std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_TRUE(gone);
}

TEST_F(ExternalCommandTest, BadOptions) {
  EXPECT_THROW(command(" "), UsageError);
  EXPECT_THROW(command(std::string("a\0b", 3)), UsageError);
  EXPECT_THROW(command("cat", 0), UsageError);
}

TEST_F(ExternalCommandTest, PythonExample) {
  if (std::system("python3 -c '' >/dev/null 2>&1") != 0) GTEST_SKIP() << "python3 is not installed";
  OwnedBatch batch;
  batch.add("2 + 2 = 4", {{"answer", "4"}}, 10);
  batch.add("1,000 or so: 1,001", {{"answer", "#### 1000"}}, 20);
  batch.add("6", {{"answer", nullptr}}, 5);
  const auto reward =
      command("python3 '" OCTET_SOURCE_DIR "/recipes/rewards/length_and_answer.py'");
  for (int i = 0; i < 2; ++i) {
    const std::vector<float> rewards = reward->score(batch.view());
    EXPECT_EQ(rewards.at(0), 0.995f);
    EXPECT_EQ(rewards.at(1), -0.01f);
    EXPECT_TRUE(std::isnan(rewards.at(2)));
  }
  EXPECT_EQ(reward->failures().num_failed_samples, 0);
}

}  // namespace
}  // namespace octet::reward
