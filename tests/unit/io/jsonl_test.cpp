#include "io/jsonl.h"

#include <nlohmann/json.hpp>
#include <zlib.h>

#include "unit/io/test_files.h"

namespace octet::io {
namespace {

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

TEST(ReadJsonl, GivesRowsColumnsAndAChecksum) {
  TempFolder folder;
  const Dataset dataset = read_jsonl(
      folder.write("a.jsonl", "{\"b\":1,\"a\":\"x\"}\r\n{\"c\":[2],\"a\":\"é\"}\n\n \n"));
  ASSERT_EQ(dataset.rows.size(), 2u);
  EXPECT_EQ(dataset.rows[1].dump(), "{\"c\":[2],\"a\":\"é\"}");
  EXPECT_EQ(dataset.columns, (std::vector<std::string>{"b", "a", "c"}));
  EXPECT_TRUE(dataset.has_column("c"));
  EXPECT_FALSE(dataset.has_column("d"));
  const Dataset check = read_jsonl(folder.write("c.jsonl", "{\"n\":1}"));
  EXPECT_EQ(check.num_bytes, 7);
  EXPECT_EQ(check.crc32, 0xD44B3B7Eu);
}

TEST(ReadJsonl, ReadsArraysAndGzip) {
  TempFolder folder;
  const std::string array = "[\n {\"a\": 1},\n {\"a\": 2}\n]";
  EXPECT_EQ(read_jsonl(folder.write("a.json", array)).rows.size(), 2u);
  const std::string lines = "\xEF\xBB\xBF{\"a\":1}\n{\"a\":2}";
  EXPECT_EQ(read_jsonl(folder.write("b.jsonl", lines)).rows[0]["a"], 1);
  EXPECT_EQ(read_jsonl(folder.write("a.json.gz", gzip(array))).rows[1]["a"], 2);
  const std::string members = gzip("{\"a\":1}\n") + gzip("{\"a\":2}\n");
  EXPECT_EQ(read_jsonl(folder.write("m.gz", members)).rows.size(), 2u);
  std::string large;
  for (int i = 0; i < 20000; ++i) large += "{\"number\":" + std::to_string(i) + "}\n";
  const Dataset dataset = read_jsonl(folder.write("l.gz", gzip(large)));
  ASSERT_EQ(dataset.rows.size(), 20000u);
  EXPECT_EQ(dataset.rows.back()["number"], 19999);
}

TEST(ReadJsonl, NamesTheLineOfBadInput) {
  TempFolder folder;
  const auto message = [&](const std::string& content) {
    return error_of([&] { read_jsonl(folder.write("bad.jsonl", content)); });
  };
  expect_contains(message("{\"a\":1}\n{\"a\":}\n"), "bad.jsonl, line 2");
  EXPECT_EQ(message("{\"a\":1}\n{\"a\":}\n").find("line 1"), std::string::npos);
  expect_contains(message("{\"a\":1}\n\n{\"a\":2}\n"), "line 2] a JSON object is required, but");
  expect_contains(message("{\"a\":1}\n5"), "line 2");
  expect_contains(message("{\"a\":1,\"a\":2}"), "\"a\" stands twice");
  expect_contains(message("{\"a\":\"\xFF\"}"), "line 1");
  expect_contains(message("[{\"a\":1}, 5]"), "row 2 must be a JSON object");
  expect_contains(message("[{\"a\":1}"), "valid JSON");
  for (const char* empty : {"", "\n \n", "[]"}) expect_contains(message(empty), "empty");
  const std::string packed = gzip("{\"a\":1}\n");
  expect_contains(message(packed.substr(0, packed.size() - 3)), "cut short");
  std::string damaged = packed;
  damaged[packed.size() - 6] ^= 1;
  expect_contains(message(damaged), "damaged");
  expect_contains(error_of([&] { read_jsonl(folder.path("none.jsonl")); }), "none.jsonl");
}

TEST(ReadJsonl, ReadsTheSharedDatasets) {
  const std::string shared = std::string(OCTET_SOURCE_DIR) + "/../shared/data/";
  if (!std::filesystem::exists(shared)) GTEST_SKIP() << shared << " is absent";
  EXPECT_EQ(read_jsonl(shared + "math/train.json").rows.size(), 7474u);
  EXPECT_EQ(read_jsonl(shared + "math/math500.json").rows.size(), 500u);
  EXPECT_TRUE(read_jsonl(shared + "gsm8k/test.jsonl").has_column("answer"));
}

}  // namespace
}  // namespace octet::io
