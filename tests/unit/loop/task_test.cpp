#include "loop/task.h"

#include <cstdlib>
#include <set>

#include <gtest/gtest.h>

#include "base/error.h"
#include "text/tokenizer.h"

namespace octet::loop {
namespace {

TEST(ArithmeticTask, AllProblemsOnceAndTheHeldOutOnesApart) {
  const ArithmeticTask task(2, 256, 0);
  EXPECT_EQ(task.eval().size(), 256u);
  EXPECT_EQ(task.train().size(), 10000u - 256u);
  std::set<std::string> seen;
  for (const auto* part : {&task.train(), &task.eval()}) {
    for (const Problem& problem : *part) {
      EXPECT_TRUE(seen.insert(problem.prompt).second) << problem.prompt;
      const size_t plus = problem.prompt.find('+');
      ASSERT_EQ(problem.prompt.back(), '=');
      const int sum =
          std::stoi(problem.prompt.substr(0, plus)) + std::stoi(problem.prompt.substr(plus + 1));
      EXPECT_EQ(problem.prompt.size(), 6u);
      EXPECT_EQ(problem.answer.size(), 3u);
      EXPECT_EQ(std::stoi(problem.answer), sum) << problem.prompt;
    }
  }
  EXPECT_EQ(seen.size(), 10000u);
}

TEST(ArithmeticTask, TheSeedDecidesTheOrder) {
  const auto prompts = [](int64_t seed) {
    std::vector<std::string> result;
    const ArithmeticTask task(1, 10, seed);
    for (const Problem& problem : task.eval()) result.push_back(problem.prompt);
    return result;
  };
  EXPECT_EQ(prompts(3), prompts(3));
  EXPECT_NE(prompts(3), prompts(4));
}

TEST(ArithmeticTask, TheAskedForShareOfDemonstrationsIsOffByOneOrTen) {
  const ArithmeticTask task(2, 0, 0);
  int wrong = 0;
  constexpr int kCount = 4000;
  for (int i = 0; i < kCount; ++i) {
    const Problem& problem = task.train()[static_cast<size_t>(i)];
    const std::string answer = ArithmeticTask::demonstrate(problem, 0.6, 42, i / 64, i % 64);
    EXPECT_EQ(answer, ArithmeticTask::demonstrate(problem, 0.6, 42, i / 64, i % 64));
    ASSERT_EQ(answer.size(), problem.answer.size());
    const int difference = std::abs(std::stoi(answer) - std::stoi(problem.answer));
    EXPECT_TRUE(difference == 0 || difference == 1 || difference == 10) << answer;
    wrong += difference != 0;
  }
  // Four standard deviations of a share of 4,000 draws.
  EXPECT_NEAR(wrong / static_cast<double>(kCount), 0.6, 4 * 0.0078);
  const Problem& problem = task.train()[0];
  EXPECT_EQ(ArithmeticTask::demonstrate(problem, 0.0, 1, 2, 3), problem.answer);
  EXPECT_NE(ArithmeticTask::demonstrate(problem, 1.0, 1, 2, 3), problem.answer);
}

// The smallest and the largest sums have neighbours on one side only.
TEST(ArithmeticTask, WrongDemonstrationsAreWrongAtBothEnds) {
  for (const char* right : {"00", "05", "13", "18"}) {
    const Problem problem{"", right};
    for (int64_t index = 0; index < 50; ++index) {
      const std::string answer = ArithmeticTask::demonstrate(problem, 1.0, 1, 0, index);
      const int difference = std::abs(std::stoi(answer) - std::stoi(right));
      EXPECT_TRUE(difference == 1 || difference == 10) << answer << " for " << right;
      EXPECT_TRUE(answer.size() == 2 && std::stoi(answer) >= 0 && std::stoi(answer) < 20);
    }
  }
}

TEST(ArithmeticTask, SizesThatCannotBeAreRefused) {
  EXPECT_THROW(ArithmeticTask(0, 1, 0), UsageError);
  EXPECT_THROW(ArithmeticTask(4, 1, 0), UsageError);
  EXPECT_THROW(ArithmeticTask(1, 100, 0), UsageError);
  EXPECT_THROW(ArithmeticTask(1, -1, 0), UsageError);
  EXPECT_EQ(ArithmeticTask(1, 99, 0).train().size(), 1u);
}

TEST(ArithmeticTask, ItsTokenizerKnowsItsTexts) {
  const text::Tokenizer tokenizer =
      text::Tokenizer::from_json(ArithmeticTask::tokenizer_json(), "task");
  EXPECT_EQ(tokenizer.size(), ArithmeticTask::kEosId + 1);
  EXPECT_EQ(tokenizer.token_to_id("<|endoftext|>"), ArithmeticTask::kEosId);
  EXPECT_EQ(tokenizer.encode("47+85="), (std::vector<int32_t>{4, 7, 10, 8, 5, 11}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("132<|endoftext|>")), "132<|endoftext|>");
}

}  // namespace
}  // namespace octet::loop
