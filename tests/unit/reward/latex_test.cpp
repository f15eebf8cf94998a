#include "reward/latex.h"

#include <gtest/gtest.h>

namespace octet::reward {
namespace {

TEST(Latex, LastBalancedBox) {
  EXPECT_EQ(last_boxed(R"(\boxed{1} then \boxed{\frac{1}{2}}.)"), R"(\frac{1}{2})");
  EXPECT_EQ(last_boxed(R"(\boxed{1} then \boxed{2)"), "1");  // the last one never closes
  EXPECT_EQ(last_boxed(R"(\boxed{\{1, 2\}})"), R"(\{1, 2\})");
  EXPECT_EQ(last_boxed(R"(\boxed{\left\{ 1 \right.})"), R"(\left\{ 1 \right.)");
  EXPECT_EQ(last_boxed(R"(\boxed{\boxed{5}})"), "5");
  EXPECT_EQ(last_boxed(R"(\fbox{9})"), "9");
  EXPECT_EQ(last_boxed(R"(\boxed{})"), "");
  EXPECT_EQ(last_boxed("} boxed{1} \\boxed 1 \\"), std::nullopt);
  EXPECT_EQ(last_boxed(""), std::nullopt);
  // Many that never close are one pass, not one each.
  std::string hostile;
  for (int i = 0; i < 200000; ++i) hostile += "\\boxed{";
  EXPECT_EQ(last_boxed(hostile), std::nullopt);
}

TEST(Latex, SpellingsOfOneAnswer) {
  const std::pair<const char*, const char*> kSame[] = {
      {R"(\dfrac{1}{2})", R"(\frac12)"},
      {R"(\tfrac{3}{4})", "3/4"},
      {"0.5", R"(\frac{1}{2})"},
      {R"(-\frac{1}{2})", "-0.5"},
      {".25", "0.250"},
      {R"(\left( 1, 2 \right))", "(1,2)"},
      {R"(5\text{ cm})", "5"},
      {R"(\$1{,}000)", R"(1{,}000)"},
      {R"(\$1,000)", "1000"},
      {R"(90^\circ)", "90"},
      {R"(25\%)", "25"},
      {"x = 7", "7"},
      {R"(\sqrt3)", R"(\sqrt{3})"},
      {R"(\frac\pi2)", R"(\frac\pi2)"},
      {R"(\frac{\frac12}3)", R"(\frac{\frac{1}{2}}{3})"},
      {"18.", "18"},
      {R"(\text{Monday})", R"(\text{Monday})"},
  };
  for (const auto& [a, b] : kSame) EXPECT_TRUE(same_latex_answer(a, b)) << a << " | " << b;
  const std::pair<const char*, const char*> kOther[] = {
      {"1", "2"},         {R"(\frac{1}{2})", R"(\frac{2}{1})"},
      {"(1,2)", "(2,1)"}, {"", "0"},
      {"12,34", "1,234"}, {R"(\text{Monday})", ""},
      {"x", "y"},
  };
  for (const auto& [a, b] : kOther) EXPECT_FALSE(same_latex_answer(a, b)) << a << " | " << b;
}

TEST(Latex, HostileTextEnds) {
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += "\\frac{";
  EXPECT_FALSE(same_latex_answer(nested + std::string(100000, '}'), "1"));
  std::string shallow;
  for (int i = 0; i < 140; ++i) shallow += "\\frac{";
  EXPECT_FALSE(same_latex_answer(shallow + std::string(140, '}'), "1"));
}

}  // namespace
}  // namespace octet::reward
