#include "observe/metrics.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <unistd.h>

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"

namespace octet::observe {
namespace {

namespace fs = std::filesystem;

const double kNan = std::numeric_limits<double>::quiet_NaN();

std::string scratch(const std::string& name) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("octet-{}-{}", info->name(), ::getpid());
  fs::create_directories(folder);
  fs::remove_all(folder / name);
  return (folder / name).string();
}

TEST(Metrics, ALineHoldsWhatWasComputed) {
  EXPECT_EQ(metrics_line(3, {{"reward", 0.1}, {"kl", kNan}, {"n", 1e300}}),
            R"({"step":3,"reward":0.1,"kl":null,"n":1e+300})");
  EXPECT_EQ(metrics_line(0, {}), R"({"step":0})");
  EXPECT_EQ(metrics_line(1, {{"a\"b", -std::numeric_limits<double>::infinity()}}),
            R"({"step":1,"a\"b":null})");
}

TEST(Metrics, NumbersReadBackExactly) {
  for (const double value : {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, -0.0}) {
    const Json parsed = parse_json(metrics_line(1, {{"x", value}}), "line");
    EXPECT_EQ(parsed["x"].get<double>(), value);
  }
}

TEST(Metrics, AResumedRunWritesLaterStepsAgain) {
  const std::string path = scratch("metrics.jsonl");
  {
    MetricsFile file(path, -1);
    for (int step = 1; step <= 5; ++step) file.write(step, {{"reward", step / 10.0}});
  }
  const std::string whole = read_file(path);
  { JsonLinesFile(path).append(R"({"step":6,"rew)"); }
  {
    std::string torn = read_file(path);
    torn.pop_back();  // the last line has no end
    write_file_atomically(path, torn);
  }
  {
    MetricsFile file(path, 3);
    for (int step = 4; step <= 5; ++step) file.write(step, {{"reward", step / 10.0}});
  }
  EXPECT_EQ(read_file(path), whole);
  { MetricsFile file(path, 5); }
  EXPECT_EQ(read_file(path), whole);
  { MetricsFile file(path, -1); }
  EXPECT_EQ(read_file(path), "");
}

TEST(Metrics, ACurveIsReadBack) {
  const std::string path = scratch("metrics.jsonl");
  MetricsFile file(path, -1);
  file.write(1, {{"reward", 0.25}, {"eval/reward", 0.5}});
  file.write(2, {{"reward", kNan}});
  file.write(3, {{"reward", 1}});
  const MetricCurve reward = read_metric(path, "reward");
  EXPECT_EQ(reward.steps, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(reward.values[0], 0.25);
  EXPECT_TRUE(std::isnan(reward.values[1]));
  EXPECT_EQ(reward.values[2], 1.0);
  EXPECT_EQ(read_metric(path, "eval/reward").steps, std::vector<int64_t>{1});
  EXPECT_TRUE(read_metric(path, "absent").steps.empty());
  write_file_atomically(path, "{\"step\":1}\nnonsense\n");
  try {
    read_metric(path, "reward");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(path + ":2"), std::string::npos) << error.what();
  }
}

TEST(Metrics, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_THROW(MetricsFile("/proc/none/metrics.jsonl", -1), Error);
}

TEST(Events, OneObjectPerLine) {
  const std::string path = scratch("events.jsonl");
  EventsFile events(path);
  events.write(4, "warning", "bytes \xff here");
  events.write(5, "rollback", "why", Json{{"rule", "entropy"}});
  const auto lines = split(read_file(path), '\n');
  ASSERT_EQ(lines.size(), 3u);
  const Json first = parse_json(lines[0], "line 1");
  EXPECT_EQ(first["step"], 4);
  EXPECT_EQ(first["message"], "bytes \xEF\xBF\xBD here");
  EXPECT_EQ(first["time"].get<std::string>().size(), 20u);
  EXPECT_EQ(parse_json(lines[1], "line 2")["rule"], "entropy");
}

TEST(Events, ABrokenLastLineIsTakenOff) {
  for (const std::string before : {"", "{\"step\":1}\n"}) {
    const std::string path = scratch("events.jsonl");
    write_file_atomically(path, before + "{\"time\":\"2026");
    EventsFile(path).write(2, "resume", "goes on");
    const std::string content = read_file(path);
    ASSERT_EQ(content.substr(0, before.size()), before);
    EXPECT_EQ(Json::parse(content.substr(before.size()))["step"], 2);
  }
}

TEST(Completions, GarbledTextAndMissingRewardsAreKept) {
  const std::string folder = scratch("completions");
  CompletionRecord record{.prompt = "1+1=",
                          .completion = "2\xC3\n",
                          .num_tokens = 3,
                          .finish_reason = "stop",
                          .reward = kNan,
                          .rewards = {{"gsm8k", 1}, {"command", kNan}},
                          .advantage = -0.5};
  write_completions(folder, 10, std::vector{record, record});
  const auto lines = split(read_file(folder + "/step-000010.jsonl"), '\n');
  ASSERT_EQ(lines.size(), 3u);
  const Json sample = parse_json(lines[0], "line 1");
  EXPECT_EQ(sample["step"], 10);
  EXPECT_EQ(sample["completion"], "2\xEF\xBF\xBD\n");
  EXPECT_TRUE(sample["reward"].is_null());
  EXPECT_EQ(sample["rewards"]["gsm8k"], 1);
  EXPECT_TRUE(sample["rewards"]["command"].is_null());
  EXPECT_EQ(sample["advantage"], -0.5);
}

}  // namespace
}  // namespace octet::observe
