#include "text/tokenizer.h"

#include <filesystem>
#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "text/byte_level.h"

namespace octet::text {
namespace {

using Ids = std::vector<int32_t>;

// A byte-level tokenizer of all 256 bytes (ids 0 to 255), two merges and a few added tokens.
Json byte_tokenizer() {
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    const char character = static_cast<char>(byte);
    vocabulary[bytes_to_alphabet(std::string_view(&character, 1))] = byte;
  }
  vocabulary["ab"] = 256;
  vocabulary["abc"] = 257;
  const auto added = [](int id, const char* content, bool special) {
    return Json{{"id", id},        {"content", content},  {"special", special},  {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"single_word", false}};
  };
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  return Json{
      {"added_tokens",
       {added(258, "<|end|>", true), added(259, "<|end|>>", true), added(260, "<think>", false)}},
      {"normalizer", nullptr},
      {"pre_tokenizer", byte_level},
      {"decoder", byte_level},
      {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", {"a b", {"ab", "c"}}}}}};
}

Tokenizer make(const Json& json) { return Tokenizer::from_json(json.dump(), "tokenizer.json"); }

std::string error_of(const auto& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

testing::AssertionResult has(const std::string& text, std::string_view part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

TEST(Tokenizer, MergesInOrderAndFindsTheLongestAddedToken) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  EXPECT_EQ(tokenizer.size(), 261);
  EXPECT_EQ(tokenizer.encode("abcab"), (Ids{257, 256}));
  EXPECT_EQ(tokenizer.encode("<|end|>>"), (Ids{259}));
  EXPECT_EQ(tokenizer.encode("<|end|><|end|>a<|end|>"), (Ids{258, 258, 'a', 258}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.decode(Ids{258, 257}), "<|end|>abc");
  EXPECT_EQ(tokenizer.decode(Ids{258, 257, 260}, {.skip_special_tokens = true}), "abc<think>");
  EXPECT_EQ(tokenizer.token_to_id("<think>"), 260);
  EXPECT_EQ(tokenizer.token_to_id("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(32), "Ġ");
  EXPECT_EQ(tokenizer.id_to_bytes(32), " ");
  EXPECT_TRUE(tokenizer.is_special(258));
  EXPECT_FALSE(tokenizer.is_special(260));
}

TEST(Tokenizer, TakesSpecialTextAsPlainWhenNotTrusted) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  const Ids ids = tokenizer.encode("<|end|><think>", {.parse_special = false});
  EXPECT_EQ(ids, (Ids{'<', '|', 'e', 'n', 'd', '|', '>', 260}));
  EXPECT_EQ(tokenizer.decode(ids), "<|end|><think>");
}

TEST(Tokenizer, HonoursTheFlagsOfAddedTokens) {
  Json json = byte_tokenizer();
  json["added_tokens"][0]["lstrip"] = true;
  json["added_tokens"][0]["rstrip"] = true;
  json["added_tokens"][2]["single_word"] = true;
  const Tokenizer tokenizer = make(json);
  EXPECT_EQ(tokenizer.encode("a \n<|end|>\t b"), (Ids{'a', 258, 'b'}));
  EXPECT_EQ(tokenizer.encode("<|end|> <|end|>"), (Ids{258, 258}));
  EXPECT_EQ(tokenizer.encode("<think>"), (Ids{260}));
  EXPECT_EQ(tokenizer.encode("x<think>").size(), 8u);
  EXPECT_EQ(tokenizer.encode(".<think>"), (Ids{'.', 260}));
}

TEST(Tokenizer, PutsTheTemplatesTokensAroundATextWhenAsked) {
  Json json = byte_tokenizer();
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single",
                             {{{"SpecialToken", {{"id", "<|end|>"}}}},
                              {{"Sequence", {{"id", "A"}}}},
                              {{"SpecialToken", {{"id", "<|end|>"}}}}}},
                            {"special_tokens", {{"<|end|>", {{"ids", {258}}}}}}};
  const Tokenizer tokenizer = make(json);
  EXPECT_EQ(tokenizer.encode("a"), (Ids{'a'}));
  EXPECT_EQ(tokenizer.encode("a", {.add_special_tokens = true}), (Ids{258, 'a', 258}));
}

// Random bytes that are UTF-8 come back as they were; others are refused with their offset.
TEST(Tokenizer, RoundTripsRandomText) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  std::mt19937 random(7);
  const std::vector<std::string> pieces = {
      "a",       "ab", "abc", " ",  "\n", "\xC3\xA9", "\xE6\x95\xB0", "\xF0\x9F\x99\x82",
      "<|end|>", "<|", "12",  "'s", "\0x"};
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (size_t i = random() % 20; i > 0; --i) text += pieces[random() % pieces.size()];
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    std::string bytes;
    for (size_t i = random() % 8; i > 0; --i) bytes += static_cast<char>(random());
    if (is_valid_utf8(bytes)) {
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes)), bytes);
    } else {
      EXPECT_THROW(tokenizer.encode(bytes), Error);
    }
  }
  EXPECT_TRUE(has(error_of([&] { tokenizer.encode("ab\xFF"); }), "not at byte 2"));
}

TEST(Tokenizer, EncodesLongTexts) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  constexpr size_t kLength = 200000;
  std::string mixed;
  while (mixed.size() < kLength) mixed += "abc 12\n\t\xC3\xA9'll ";
  for (const std::string& text :
       {std::string(kLength, ' '), std::string(kLength, 'a'), std::string(kLength, '\n') + "x",
        std::string(kLength, '!'), mixed}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, NormalisesLongRunsOfMarks) {
  Json json = byte_tokenizer();
  json["normalizer"] = {{"type", "NFC"}};
  const Tokenizer tokenizer = make(json);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("e\u0301 \u1100\u1161")), "\u00E9 \uAC00");
  std::string marks = "e", sorted = "\u1EB9\u0301";
  for (int i = 0; i < 50000; ++i) marks += "\u0301\u0323";  // above, then below
  const std::string result = tokenizer.decode(tokenizer.encode(marks));
  // The marks below come first; one of them joins the letter.
  EXPECT_EQ(result.substr(0, 7), "\u1EB9\u0323\u0323");
  EXPECT_EQ(result.size(), marks.size() - 1 - 2 + 3);
}

TEST(Tokenizer, DecodesBrokenUtf8WithReplacementCharacters) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  EXPECT_EQ(tokenizer.decode(Ids{0xF0, 0x9F, 'a'}), "\uFFFDa");
  EXPECT_EQ(tokenizer.decode(Ids{0x80, 0xFF, 0xE6, 0x95}), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xE0, 0x80}), "\uFFFD\uFFFD");  // overlong: two parts
  EXPECT_TRUE(has(error_of([&] { tokenizer.decode(Ids{261}); }), "is 261"));
  EXPECT_THROW(tokenizer.decode(Ids{-1}), Error);
}

TEST(IncrementalDecoder, HoldsBackIncompleteCharacters) {
  IncrementalDecoder decoder(make(byte_tokenizer()));
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(0x99), "");
  EXPECT_EQ(decoder.push(0x82), "\xF0\x9F\x99\x82");
  EXPECT_EQ(decoder.push(0xE6), "");
  EXPECT_EQ(decoder.push(258), "\uFFFD<|end|>");
  EXPECT_EQ(decoder.push(0xE6), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(IncrementalDecoder, EqualsDecodeOnRandomIds) {
  const Tokenizer tokenizer = make(byte_tokenizer());
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Ids ids(random() % 30);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 261);
    IncrementalDecoder decoder(tokenizer);
    std::string text;
    for (const int32_t id : ids) {
      const std::string part = decoder.push(id);
      EXPECT_TRUE(is_valid_utf8(part));
      text += part;
    }
    text += decoder.finish();
    EXPECT_EQ(text, tokenizer.decode(ids));
  }
}

TEST(Tokenizer, JoinsByteTokensAndStripsOneSpace) {
  Json json = byte_tokenizer();
  json["pre_tokenizer"] = nullptr;
  json["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Prepend"}, {"prepend", "▁"}},
        {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}}}};
  json["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  json["model"] = {{"type", "BPE"},
                   {"byte_fallback", true},
                   {"vocab", {{"▁", 0}, {"a", 1}, {"<0xC3>", 2}, {"<0xA9>", 3}, {"▁a", 4}}},
                   {"merges", {"▁ a"}}};
  const Tokenizer tokenizer = make(json);
  EXPECT_EQ(tokenizer.encode("a é a"), (Ids{4, 0, 2, 3, 4}));
  EXPECT_EQ(tokenizer.decode(Ids{4, 0, 2, 3, 4}), "a é a");
  EXPECT_EQ(tokenizer.decode(Ids{2, 3, 2, 1}), "\uFFFD\uFFFD\uFFFDa");
  EXPECT_TRUE(has(error_of([&] { tokenizer.encode("ab"); }), "\"b\" at byte 1"));
}

TEST(Tokenizer, NamesWhatIsWrongWithAFile) {
  const auto error_with = [](const char* pointer, const Json& value) {
    Json json = byte_tokenizer();
    json[Json::json_pointer(pointer)] = value;
    return error_of([&] { make(json); });
  };
  EXPECT_TRUE(has(error_with("/model/vocab/ab", "x"), "\"model.vocab.ab\" must be an integer"));
  EXPECT_TRUE(has(error_with("/model/vocab/ab", -1), "model.vocab.ab"));
  EXPECT_TRUE(has(error_with("/model/vocab/ab", 1e18), "model.vocab.ab"));
  EXPECT_TRUE(has(error_with("/model/vocab/ab", 18446744073709551615u), "model.vocab.ab"));
  EXPECT_TRUE(has(error_with("/model/vocab/ab", 97), "no other token"));
  EXPECT_TRUE(has(error_with("/model/merges/0", "a"), "model.merges[0]"));
  EXPECT_TRUE(has(error_with("/model/merges/0", "b a"), "model.merges[0]"));
  EXPECT_TRUE(has(error_with("/model/merges/1", Json::array({"a"})), "model.merges[1]"));
  EXPECT_TRUE(has(error_with("/model/type", "Unigram"), "\"model.type\" must be"));
  EXPECT_TRUE(has(error_with("/model/dropout", 0.1), "model.dropout"));
  EXPECT_TRUE(has(error_with("/normalizer", {{"type", "Lowercase"}}), "\"Lowercase\""));
  EXPECT_TRUE(has(error_with("/pre_tokenizer/type", "Metaspace"), "\"Metaspace\""));
  EXPECT_TRUE(has(error_with("/decoder/type", "WordPiece"), "\"WordPiece\""));
  EXPECT_TRUE(has(error_with("/post_processor", {{"type", "Bert"}}), "\"Bert\""));
  EXPECT_TRUE(has(error_with("/added_tokens/0/id", 97), "with an id of its own"));
  EXPECT_TRUE(has(error_with("/added_tokens/0/content", ""), "added_tokens[0].content"));
  EXPECT_TRUE(has(error_with("/added_tokens/0/special", 1), "added_tokens[0].special"));
  EXPECT_TRUE(
      has(error_with("/pre_tokenizer",
                     {{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(a"}}}}),
          "\"(a\" is none at offset 2"));
  EXPECT_TRUE(has(error_of([] { Tokenizer::from_json("[]", "file"); }), "[file] \"the document\""));
  EXPECT_TRUE(has(error_of([] { Tokenizer::from_json("{", "file"); }), "valid JSON"));
  EXPECT_TRUE(has(error_of([] { Tokenizer::load("/nowhere"); }), "/nowhere"));
}

TEST(Tokenizer, ReadsTheFolderItsModelComesWith) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "octet_tokenizer";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  EXPECT_TRUE(has(error_of([&] { Tokenizer::load(folder); }), "tokenizer.json is required"));
  write_file_atomically(folder / "tokenizer.json", byte_tokenizer().dump());
  EXPECT_EQ(Tokenizer::load(folder).eos_id(), std::nullopt);
  Json config = {
      {"eos_token", {{"content", "<|end|>"}}},
      {"pad_token", "<|end|>"},
      {"bos_token", nullptr},
      {"chat_template",
       {{{"name", "default"}, {"template", "one"}}, {{"name", "tool_use"}, {"template", "two"}}}}};
  write_file_atomically(folder / "tokenizer_config.json", config.dump());
  Tokenizer tokenizer = Tokenizer::load(folder);
  EXPECT_EQ(tokenizer.eos_id(), 258);
  EXPECT_EQ(tokenizer.pad_id(), 258);
  EXPECT_EQ(tokenizer.bos_id(), std::nullopt);
  ASSERT_NE(tokenizer.chat_template(), nullptr);
  EXPECT_EQ(*tokenizer.chat_template(), "one");
  EXPECT_EQ(*tokenizer.chat_template("tool_use"), "two");
  EXPECT_EQ(tokenizer.chat_template("other"), nullptr);
  write_file_atomically(folder / "chat_template.jinja", "three");
  EXPECT_EQ(*Tokenizer::load(folder).chat_template(), "three");
  config["eos_token"] = "<|no such|>";
  write_file_atomically(folder / "tokenizer_config.json", config.dump());
  EXPECT_TRUE(has(error_of([&] { Tokenizer::load(folder); }), "eos_token"));
  std::filesystem::remove_all(folder);
}

TEST(CharacterTokenizer, HoldsItsCharactersAndNothingElse) {
  const std::vector<std::string> special = {"<|endoftext|>", "<|im_start|>"};
  const Tokenizer tokenizer =
      Tokenizer::from_json(make_character_tokenizer("0123456789+= \n", special), "made");
  EXPECT_EQ(tokenizer.size(), 16);
  EXPECT_EQ(tokenizer.encode("<|im_start|>1+2 =\n<|endoftext|>"),
            (Ids{15, 1, 10, 2, 12, 11, 13, 14}));
  EXPECT_EQ(tokenizer.decode(Ids{15, 1, 10, 2}), "<|im_start|>1+2");
  const std::string error = error_of([&] { tokenizer.encode("<|im_start|>1+\u00E9"); });
  EXPECT_TRUE(has(error, "\"\u00E9\" at byte 14"));
  EXPECT_THROW(make_character_tokenizer("11", special), Error);
  EXPECT_THROW(make_character_tokenizer("\u00E9", special), Error);
}

}  // namespace
}  // namespace octet::text
