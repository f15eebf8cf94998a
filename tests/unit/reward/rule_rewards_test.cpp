#include <cmath>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/json.h"
#include "unit/reward/reward_batch.h"

namespace octet::reward {
namespace {

float score(const std::string& name, const std::string& completion, const Json& columns = {},
            const Json& options = {}, size_t num_tokens = 3) {
  OwnedBatch batch;
  batch.add(completion, columns, num_tokens);
  return make_reward(name, options)->score(batch.view()).at(0);
}

Json answer(const char* text) { return {{"answer", text}}; }

TEST(RuleRewards, Gsm8kStrict) {
  const Json gold = answer("She has 9 * 2 = $<<9*2=18>>18.\n#### 18");
  EXPECT_EQ(score("gsm8k", "so it is 18\n#### 18", gold), 1);
  EXPECT_EQ(score("gsm8k", "#### 17 no, #### 18.0", gold), 1);  // the last one
  EXPECT_EQ(score("gsm8k", "#### 18 no, #### 17", gold), 0);
  EXPECT_EQ(score("gsm8k", "#### 18, or #### what", gold), 1);  // the last that is a number
  EXPECT_EQ(score("gsm8k", "#### $18.", gold), 1);
  EXPECT_EQ(score("gsm8k", "the answer is 18", gold), 0);
  EXPECT_EQ(score("gsm8k", "####18", gold), 0);
  EXPECT_EQ(score("gsm8k", "", gold), 0);
  EXPECT_EQ(score("gsm8k", "#### 18" + std::string(300, ' '), gold), 0);  // too far from the end
  EXPECT_EQ(score("gsm8k", "#### 1,800", answer("#### 1800")), 1);
  EXPECT_EQ(score("gsm8k", "#### -3", answer("-3")), 1);
}

TEST(RuleRewards, NumericAndExactMatch) {
  EXPECT_EQ(score("numeric", "12 + 30 = 42", {{"answer", 42}}), 1);
  EXPECT_EQ(score("numeric", "12 + 30 = 42", {{"answer", 42.0}}), 1);
  EXPECT_EQ(score("numeric", "42, I mean 43", {{"answer", 42}}), 0);
  EXPECT_EQ(score("numeric", "the answer is 18.", answer("#### 18")), 1);
  EXPECT_EQ(score("numeric", "none", answer("#### 18")), 0);
  EXPECT_EQ(score("numeric", "", {{"answer", 42}}), 0);
  EXPECT_EQ(score("exact_match", "42", {{"answer", 42}}), 1);
  EXPECT_EQ(score("exact_match", " 42\n", answer("42")), 1);
  EXPECT_EQ(score("exact_match", "42.0", answer("42")), 0);
  EXPECT_EQ(score("exact_match", "=42", answer("42")), 0);
}

TEST(RuleRewards, Boxed) {
  EXPECT_EQ(score("boxed", R"(so \boxed{\dfrac{1}{2}})", answer(R"(\frac{1}{2})")), 1);
  EXPECT_EQ(score("boxed", R"(so \boxed{0.5})", {{"solution", R"(… is $\boxed{\frac12}$.)"}},
                  {{"answer_field", "solution"}}),
            1);
  EXPECT_EQ(score("boxed", R"(so \boxed{3})", answer("4")), 0);
  EXPECT_EQ(score("boxed", "so 4", answer("4")), 0);
}

TEST(RuleRewards, AnswersFromInsideAnObject) {
  const Json columns = {{"reward_model", {{"ground_truth", "72"}}}};
  EXPECT_EQ(score("numeric", "72", columns, {{"answer_field", "reward_model.ground_truth"}}), 1);
}

TEST(RuleRewards, AnswersThatCannotBeUsed) {
  try {
    score("numeric", "1", {{"solution", "1"}});
    FAIL();
  } catch (const Error& error) {  // names the column and those there are
    EXPECT_NE(std::string(error.what()).find("\"answer\""), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("solution"), std::string::npos);
  }
  OwnedBatch batch;
  batch.add("1", answer("one"));
  batch.add("1", {{"answer", nullptr}});
  batch.add("1", answer("1"));
  const auto reward = make_reward("numeric", {});
  const std::vector<float> rewards = reward->score(batch.view());
  EXPECT_TRUE(std::isnan(rewards[0]));
  EXPECT_TRUE(std::isnan(rewards[1]));
  EXPECT_EQ(rewards[2], 1);
  EXPECT_EQ(reward->failures().num_failed_samples, 2);
}

TEST(RuleRewards, ThinkFormat) {
  EXPECT_EQ(score("format", "<think>\na\n</think>\nb\nc"), 1);
  EXPECT_EQ(score("format", "<think></think>"), 1);
  EXPECT_EQ(score("format", " <think>a</think>b"), 0);
  EXPECT_EQ(score("format", "<think>a<think>b</think>c"), 0);
  EXPECT_EQ(score("format", "<think>a</think>b<think>"), 0);
  EXPECT_EQ(score("format", "<think>a"), 0);
  EXPECT_EQ(score("format", ""), 0);
}

TEST(RuleRewards, Regex) {
  const Json options = {{"pattern", "^<a>.*</a>$"}};
  EXPECT_EQ(score("regex", "<a>1\n2</a>", {}, options), 1);
  EXPECT_EQ(score("regex", "x\n<a></a>\ny", {}, options), 1);  // ^ and $ at lines
  EXPECT_EQ(score("regex", "<a>", {}, options), 0);
  EXPECT_EQ(score("regex", "\xff\xfe <a>", {}, options), 0);  // broken UTF-8 is no error
  EXPECT_THROW(make_reward("regex", {{"pattern", "(["}}), UsageError);
  EXPECT_THROW(make_reward("regex", {}), UsageError);
  // A pattern that runs away ends, and says so.
  const auto runaway = make_reward("regex", {{"pattern", "^(a+)+$(?!)|(a|aa)+b"}});
  OwnedBatch batch;
  batch.add(std::string(60, 'a') + "c");
  EXPECT_TRUE(std::isnan(runaway->score(batch.view()).at(0)));
  EXPECT_EQ(runaway->failures().num_failed_samples, 1);
}

TEST(RuleRewards, SoftOverlongPenalty) {
  const Json options = {{"max_length", 20}, {"cache", 4}};
  EXPECT_EQ(score("length", "", {}, options, 0), 0);
  EXPECT_EQ(score("length", "", {}, options, 16), 0);
  EXPECT_EQ(score("length", "", {}, options, 17), -0.25f);
  EXPECT_EQ(score("length", "", {}, options, 20), -1.0f);
  EXPECT_THROW(make_reward("length", {{"max_length", 20}}), UsageError);
  EXPECT_THROW(make_reward("length", {{"max_length", 2}, {"cache", 4}}), UsageError);
}

TEST(RuleRewards, UnknownNamesAndOptions) {
  const auto message = [](const char* name, const Json& options) -> std::string {
    try {
      make_reward(name, options);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message("gsm8", {}).find("did you mean \"gsm8k\""), std::string::npos);
  EXPECT_NE(message("numeric", {{"answer_fild", "x"}}).find("answer_field"), std::string::npos);
  EXPECT_NE(message("numeric", {{"answer_field", 3}}).find("must be text"), std::string::npos);
  EXPECT_FALSE(message("numeric", Json::array({1})).empty());
  for (const std::string& name : reward_names()) {
    EXPECT_EQ(message("nothing like it", {}).find("did you mean"), std::string::npos) << name;
  }
}

TEST(RuleRewards, Combine) {
  const std::vector<std::vector<float>> rewards = {{1, kNoReward, kNoReward}, {2, 3, kNoReward}};
  const std::vector<float> sum = combine_rewards(rewards, {});
  EXPECT_EQ(sum[0], 3);
  EXPECT_EQ(sum[1], 3);
  EXPECT_TRUE(std::isnan(sum[2]));
  const std::vector<double> weights = {2, 0.5};
  EXPECT_EQ(combine_rewards(rewards, weights)[0], 3);
  EXPECT_EQ(combine_rewards(rewards, weights)[1], 1.5);
  EXPECT_THROW(combine_rewards(rewards, std::vector<double>{1}), Error);
}

}  // namespace
}  // namespace octet::reward
