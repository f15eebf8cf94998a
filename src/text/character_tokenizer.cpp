#include <set>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "text/byte_level.h"
#include "text/tokenizer.h"

namespace octet::text {

std::string make_character_tokenizer(std::string_view characters,
                                     std::span<const std::string> special_tokens) {
  const std::string_view where = "make_character_tokenizer";
  std::set<std::string> seen;
  const auto check_new = [&](const std::string& token) {
    if (token.empty() || !seen.insert(token).second) {
      fail(where, "tokens must be given once and not be empty, but \"{}\" is not so", token);
    }
  };
  Json vocabulary = Json::object();
  for (const char character : characters) {
    if (static_cast<unsigned char>(character) >= 0x80) {
      fail(where, "characters must be ASCII, but \"{}\" is not", characters);
    }
    const std::string token = bytes_to_alphabet(std::string_view(&character, 1));
    check_new(token);
    vocabulary[token] = vocabulary.size();
  }
  Json added = Json::array();
  for (const std::string& token : special_tokens) {
    check_new(token);
    added.push_back({{"id", vocabulary.size() + added.size()},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", false},
                           {"use_regex", false}};
  return Json({{"version", "1.0"},
               {"truncation", nullptr},
               {"padding", nullptr},
               {"added_tokens", std::move(added)},
               {"normalizer", nullptr},
               {"pre_tokenizer", byte_level},
               {"post_processor", nullptr},
               {"decoder", byte_level},
               {"model",
                {{"type", "BPE"},
                 {"dropout", nullptr},
                 {"unk_token", nullptr},
                 {"continuing_subword_prefix", nullptr},
                 {"end_of_word_suffix", nullptr},
                 {"fuse_unk", false},
                 {"byte_fallback", false},
                 {"ignore_merges", false},
                 {"vocab", std::move(vocabulary)},
                 {"merges", Json::array()}}}})
             .dump(2) +
         "\n";
}

}  // namespace octet::text
