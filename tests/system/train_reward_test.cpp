// Rewards in a run: external commands that fail in each way, and groups that teach nothing.
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "system/train_support.h"

namespace octet::test {
namespace {

// Two steps of 16 samples; no evaluation.
const Arguments kShort = {"train.max_steps=2", "data.task_eval_size=0"};

const std::string kSixteen = "1,0,0,1,1,0,1,0,0,1,1,0,1,0,1,0";

// A script that answers every batch with this.
std::string answers(const std::string& text) {
  return "while read -r line; do echo '" + text + "'; done\n";
}

std::string run_with(const Trainer& trainer, const std::string& script,
                     const Arguments& more = {}) {
  return trainer.trained("run", kShort + trainer.reward_script("reward.sh", script) + more);
}

TEST(TrainReward, ACommandsRewards) {
  const Trainer trainer;
  const std::string run = run_with(trainer, answers("{\"rewards\":[" + kSixteen + "]}"));
  EXPECT_EQ(values_of(run, "reward"), std::vector<double>(2, 0.5));
  EXPECT_TRUE(values_of(run, "rewards/missing").empty());
  EXPECT_FALSE(has_event(run, "reward_failed"));
}

TEST(TrainReward, TheExampleInPython) {
  if (run_program("python3", {"--version"}).exit_code != 0) GTEST_SKIP() << "python3 is missing";
  const Trainer trainer;
  const std::string run = trainer.trained(
      "run", {"reward.functions=[]", "train.max_steps=1",
              "reward.command=python3 " OCTET_SOURCE_DIR "/recipes/rewards/length_and_answer.py"});
  for (const Json& sample : read_lines(run + "/completions/step-000001.jsonl")) {
    // The right answer is worth 1, each token costs 0.0005.
    const std::string prompt = sample["prompt"];
    const int sum = (prompt[0] - '0') + (prompt[2] - '0');
    std::string last;
    for (const char c : sample["completion"].get<std::string>()) {
      if (c >= '0' && c <= '9') {
        last += c;
      } else if (!last.empty() && last.back() != ' ') {
        last += ' ';
      }
    }
    while (!last.empty() && last.back() == ' ') last.pop_back();
    if (const size_t at = last.rfind(' '); at != std::string::npos) last = last.substr(at + 1);
    const bool right = !last.empty() && std::stoi(last) == sum;
    EXPECT_NEAR(sample["reward"].get<double>(),
                (right ? 1.0 : 0.0) - 0.0005 * sample["num_tokens"].get<double>(), 1e-6)
        << sample;
  }
  EXPECT_FALSE(has_event(run, "reward_failed"));
}

// The run goes on: every sample of both steps has no reward, which is counted and told.
void expect_all_missing(const std::string& script, const std::string& reason,
                        const Arguments& more = {}) {
  const Trainer trainer;
  const std::string run = run_with(trainer, script, more);
  EXPECT_EQ(values_of(run, "rewards/missing"), std::vector<double>(2, 16.0)) << reason;
  EXPECT_TRUE(values_of(run, "reward").empty());
  EXPECT_TRUE(values_of(run, "reward_std").empty());
  EXPECT_EQ(values_of(run, "grad_norm"), std::vector<double>(2, 0.0));
  EXPECT_TRUE(has_event(run, "reward_failed", reason))
      << reason << " in " << read_text(run + "/events.jsonl");
  for (const Json& sample : read_lines(run + "/completions/step-000002.jsonl")) {
    EXPECT_TRUE(sample["reward"].is_null());
    EXPECT_EQ(sample["advantage"], 0);
  }
}

TEST(TrainReward, NoAnswerInTime) {
  expect_all_missing("read -r line; sleep 20\n", "no answer within 200 ms", {"reward.timeout=0.2"});
}

TEST(TrainReward, ACrash) { expect_all_missing("read -r line; exit 7\n", "exit code 7"); }

TEST(TrainReward, NoProgram) { expect_all_missing("exec /nowhere/program\n", "exit code 127"); }

TEST(TrainReward, TheWrongCount) {
  expect_all_missing(answers("{\"rewards\":[1,2,3]}"), "16 rewards are required, but 3 came");
}

TEST(TrainReward, NoJson) { expect_all_missing(answers("hello"), "no JSON"); }

TEST(TrainReward, AllNullIsNoFailure) {
  const Trainer trainer;
  std::string nulls = "null";
  for (int i = 1; i < 16; ++i) nulls += ",null";
  const std::string run = run_with(trainer, answers("{\"rewards\":[" + nulls + "]}"));
  EXPECT_EQ(values_of(run, "rewards/missing"), std::vector<double>(2, 16.0));
  EXPECT_FALSE(has_event(run, "reward_failed"));
}

TEST(TrainReward, OneThatIsNotANumber) {
  const Trainer trainer;
  const std::string run =
      run_with(trainer, answers("{\"rewards\":[NaN" + kSixteen.substr(1) + "]}"));
  EXPECT_EQ(values_of(run, "rewards/missing"), std::vector<double>(2, 1.0));
  EXPECT_NEAR(values_of(run, "reward")[0], 7.0 / 15, 1e-12);  // over those that have one
  EXPECT_TRUE(has_event(run, "reward_failed", "sample 0"));
  const std::vector<Json> samples = read_lines(run + "/completions/step-000001.jsonl");
  EXPECT_TRUE(samples[0]["reward"].is_null());
  EXPECT_EQ(samples[0]["advantage"], 0);
  // The others of its group are measured against each other.
  EXPECT_NEAR(samples[3]["advantage"].get<double>(), (2.0 / 3) / (std::sqrt(1.0 / 3) + 1e-4), 1e-9);
}

TEST(TrainReward, TheRunRecovers) {
  const Trainer trainer;
  const std::string marker = trainer.path("marker");
  const std::string run = run_with(trainer, "if [ ! -e " + marker + " ]; then touch " + marker +
                                                "; read -r line; exit 3; fi\n" +
                                                answers("{\"rewards\":[" + kSixteen + "]}"));
  EXPECT_EQ(values_of(run, "rewards/missing"), std::vector<double>{16.0});
  EXPECT_EQ(values_of(run, "reward"), std::vector<double>{0.5});
}

TEST(TrainReward, ACommandThatIsGivenUpEndsTheRun) {
  const Trainer trainer;
  const Arguments more = kShort + Arguments{"train.max_steps=30", "train.save_steps=0"};
  const Outcome ended =
      trainer.train("run", more + trainer.reward_script("reward.sh", "read -r line; exit 7\n"));
  expect_message(ended, 1, {"[reward.command]", "given up", "--resume"});
  const std::string run = trainer.path("run");
  EXPECT_TRUE(has_event(run, "failed", "given up"));
  const size_t num_steps = values_of(run, "rewards/missing").size();
  EXPECT_LE(num_steps, 12u);
  // Nothing is lost: mended, the run goes on.
  trainer.trained(
      "run", more + Arguments{"--resume"} +
                 trainer.reward_script("reward.sh", answers("{\"rewards\":[" + kSixteen + "]}")));
  EXPECT_TRUE(has_event(run, "resume", fmt::format("{:06}", num_steps)));
  EXPECT_EQ(values_of(run, "reward").size(), 30 - num_steps);
}

// Whether the process has ended; one that nobody has reaped yet is as good as gone.
bool has_ended(const std::string& pid) {
  std::ifstream stat("/proc/" + pid + "/stat");
  std::string id, name, state;
  return !(stat >> id >> name >> state) || state == "Z";
}

TEST(TrainReward, TheCommandEndsWithTheProgramHoweverItEnds) {
  for (const std::vector<int>& signals : {std::vector<int>{SIGKILL}, {SIGINT, SIGINT}}) {
    const Trainer trainer;
    const std::string pids = trainer.path("pids");
    RunningProgram program(trainer.command(
        "run", trainer.reward_script("reward.sh", "sleep 60 &\necho $$ $! end > " + pids +
                                                      "\nread -r line; wait\n")));
    std::string leader, inner, end;
    ASSERT_TRUE(program.wait_until(
        [&] { return static_cast<bool>(std::ifstream(pids) >> leader >> inner >> end); }));
    for (const int number : signals) {
      program.signal(number);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_EQ(program.wait().exit_code, 128 + signals[0]);
    for (int i = 0; i < 100 && !(has_ended(leader) && has_ended(inner)); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_TRUE(has_ended(leader) && has_ended(inner)) << leader << " " << inner;
  }
}

TEST(TrainReward, EqualRewardsTeachNothing) {
  for (const Arguments& flow : {Arguments{}, kFp8Full}) {
    const Trainer trainer;
    const std::string run = trainer.trained("run", kShort + flow + Arguments{"reward.pattern=^"});
    for (const double value : values_of(run, "frac_reward_zero_std")) EXPECT_EQ(value, 1);
    EXPECT_EQ(values_of(run, "grad_norm"), std::vector<double>(2, 0.0));
    EXPECT_EQ(values_of(run, "loss"), std::vector<double>(2, 0.0));
  }
}

TEST(TrainReward, WeightsAndSeveralFunctions) {
  const Trainer trainer;
  const std::string run = trainer.trained(
      "run", kShort + Arguments{"reward.functions=[\"regex\", \"length\"]",
                                "reward.reward_weights=[2.0, 0.5]", "reward.soft_punish_cache=2"});
  for (size_t step = 0; step < 2; ++step) {
    EXPECT_NEAR(values_of(run, "reward")[step],
                2 * values_of(run, "rewards/regex/mean")[step] +
                    0.5 * values_of(run, "rewards/length/mean")[step],
                1e-6);
  }
}

}  // namespace
}  // namespace octet::test
