#include "reward/number.h"

#include <gtest/gtest.h>

namespace octet::reward {
namespace {

bool same(std::string_view a, std::string_view b) {
  const auto x = parse_number(a);
  const auto y = parse_number(b);
  return x && y && *x == *y;
}

TEST(Number, SpellingsOfOneNumber) {
  EXPECT_TRUE(same("1,000", "1000"));
  EXPECT_TRUE(same("$1,234.50", "1234.5"));
  EXPECT_TRUE(same("18.", "18.0"));
  EXPECT_TRUE(same(" 018 ", "18"));
  EXPECT_TRUE(same("-$5", "-5.00"));
  EXPECT_TRUE(
      same("\xE2\x88\x92"
           "7",
           "-7"));
  EXPECT_TRUE(same("+3", "3"));
  EXPECT_TRUE(same(".5", "1/2"));
  EXPECT_TRUE(same("6/8", "0.75"));
  EXPECT_TRUE(same("-0", "0.0"));
  EXPECT_TRUE(same("0/7", "0"));
  EXPECT_TRUE(same("50%", "50"));
}

TEST(Number, ComparisonIsExact) {
  EXPECT_FALSE(same("0.1", "0.10000000000000000555"));  // one float64 for both
  EXPECT_FALSE(same("9007199254740993", "9007199254740992"));
  EXPECT_FALSE(same("1/3", "0.3333333333333333"));
  EXPECT_TRUE(same("2/6", "1/3"));
  EXPECT_FALSE(same("18", "-18"));
}

TEST(Number, WhatIsNone) {
  for (const char* text :
       {"", " ", "-", "$", ".", ",", "1.2.3", "5 apples", "x", "1/0", "1/", "--5", "1e5", "%"}) {
    EXPECT_FALSE(parse_number(text)) << text;
  }
  EXPECT_FALSE(parse_number(std::string(100000, '7')));
  EXPECT_TRUE(parse_number(std::string(200, '7')));
}

TEST(Number, LastOneInAText) {
  const auto last = [](std::string_view text, std::string_view wanted) {
    const auto number = last_number(text);
    return number && number == parse_number(wanted);
  };
  EXPECT_TRUE(last("so 3 + 4 = 7.", "7"));
  EXPECT_TRUE(last("10-3", "3"));     // an operator
  EXPECT_TRUE(last("x = -3", "-3"));  // a sign
  EXPECT_TRUE(last("(2)-3", "3"));
  EXPECT_TRUE(last("she pays $1,250.00 in all, thanks.", "1250"));
  EXPECT_TRUE(last("the answer is 3/4", "0.75"));
  EXPECT_TRUE(last("version 7 of 1.2.3", "7"));  // 1.2.3 is no number
  EXPECT_TRUE(last("well ...5", "5"));
  EXPECT_TRUE(last("a5", "5"));
  EXPECT_TRUE(last("5, ", "5"));
  EXPECT_FALSE(last_number("none at all. - $ ,"));
  EXPECT_FALSE(last_number(""));
}

}  // namespace
}  // namespace octet::reward
