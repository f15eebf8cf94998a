#include "base/strings.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "base/error.h"

namespace octet {
namespace {

TEST(NearestName, FindsATypingErrorAndNothingFarAway) {
  const std::vector<std::string> names = {"learning_rate", "weight_decay", "optim"};
  EXPECT_EQ(nearest_name("learning_rat", names), "learning_rate");
  EXPECT_EQ(nearest_name("wieght_decay", names), "weight_decay");
  EXPECT_EQ(nearest_name("zzzzzzzz", names), "");
}

TEST(Bytes, ReadBackAndRejectNonsense) {
  EXPECT_EQ(parse_bytes("5GiB", "x"), int64_t{5} << 30);
  EXPECT_EQ(parse_bytes(" 16 GB ", "x"), 16'000'000'000);
  EXPECT_EQ(parse_bytes("1048576", "x"), 1 << 20);
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  for (const char* bad : {"", "GiB", "-5GiB", "5 apples"}) {
    EXPECT_THROW(parse_bytes(bad, "--device-memory-limit"), UsageError) << bad;
  }
}

TEST(Utf8, AcceptsScalarsAndRejectsTheRest) {
  EXPECT_TRUE(is_valid_utf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"));
  for (const char* bad :
       {"\x80", "\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF5\x80\x80\x80", "\xE0\x80\xAF"}) {
    EXPECT_FALSE(is_valid_utf8(bad)) << bad;
  }
}

TEST(WriteFileAtomically, ReplacesOrLeavesUntouched) {
  const std::string folder = testing::TempDir() + "/octet_strings";
  std::filesystem::create_directories(folder);
  write_file_atomically(folder + "/a", "one");
  write_file_atomically(folder + "/a", "two");
  EXPECT_EQ(read_file(folder + "/a"), "two");
  EXPECT_FALSE(std::filesystem::exists(folder + "/a.tmp"));
  EXPECT_THROW(write_file_atomically(folder + "/missing/a", "x"), Error);
  EXPECT_THROW(read_file(folder), Error);
  EXPECT_THROW(read_file(folder + "/none"), Error);
}

}  // namespace
}  // namespace octet
