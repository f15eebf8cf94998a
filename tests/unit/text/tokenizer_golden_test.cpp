// Encodings and decodings of real tokenizers, made with Hugging Face tokenizers 0.23.2.
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "text/tokenizer.h"

namespace octet::text {
namespace {

struct Case {
  const char* golden;  // below the golden data
  const char*
      folder;  // below ../shared/data/tokenizers, which holds files under licences of their own
};

class TokenizerGolden : public testing::TestWithParam<Case> {};

TEST_P(TokenizerGolden, EncodesAndDecodesAsHuggingFace) {
  const std::string shared = OCTET_SOURCE_DIR "/../shared/data/";
  const std::string folder = shared + "tokenizers/" + GetParam().folder;
  std::string golden =
      std::string(OCTET_SOURCE_DIR "/tests/golden/data/tokenizer/") + GetParam().golden;
  if (!std::filesystem::exists(golden)) golden = shared + "golden/tokenizer/" + GetParam().golden;
  if (!std::filesystem::exists(folder) || !std::filesystem::exists(golden)) {
    GTEST_SKIP() << "the real tokenizer is not there: " << folder;
  }
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const Json rows = read_json_file(golden);
  ASSERT_GT(rows.size(), 10u);
  for (const Json& row : rows) {
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(text), ids) << text;
    EXPECT_EQ(tokenizer.encode(text, {.add_special_tokens = true}),
              row["ids_with_special"].get<std::vector<int32_t>>())
        << text;
    EXPECT_EQ(tokenizer.decode(ids), row["decoded"].get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Real, TokenizerGolden,
                         testing::Values(Case{"qwen3.json", "qwen3"},
                                         Case{"llama3_1.json", "llama3.1"},
                                         Case{"phi-2.json", "phi-2"}, Case{"gemma3.json", "gemma3"},
                                         Case{"phi-3-mini.json", "phi-3-mini"}),
                         [](const auto& info) {
                           std::string name = info.param.folder;
                           std::erase_if(name, [](char c) { return !std::isalnum(c); });
                           return name;
                         });

}  // namespace
}  // namespace octet::text
