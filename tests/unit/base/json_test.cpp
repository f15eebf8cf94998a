#include "base/json.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet {
namespace {

TEST(ParseJson, NamesThePlaceOfAnError) {
  EXPECT_EQ(parse_json(R"({"b":1,"a":[2]})", "x").dump(), R"({"b":1,"a":[2]})");
  try {
    parse_json("{\"a\": 1,\n oops}", "data.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("data.jsonl"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("line 2"), std::string::npos) << error.what();
  }
  EXPECT_THROW(parse_json(R"({"a":1,"a":2})", "x"), Error);
  EXPECT_THROW(parse_json(std::string(100000, '['), "x"), Error);
  EXPECT_NO_THROW(parse_json(std::string(400, '[') + std::string(400, ']'), "x"));
  EXPECT_NO_THROW(parse_json(R"([{"a":1},{"a":2,"b":{"a":3}}])", "x"));
}

TEST(JsonNumber, ReadsBackExactly) {
  for (float value : {0.1f, -1.0f / 3, 1e-45f, 3.4028235e38f, 16777217.0f, 0.0f}) {
    EXPECT_EQ(std::strtof(json_number(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(json_number(-std::numeric_limits<float>::infinity()), "null");
}

}  // namespace
}  // namespace octet
