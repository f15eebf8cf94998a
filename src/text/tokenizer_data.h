// What a Tokenizer holds; for the sources of this folder only.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"
#include "text/tokenizer.h"

namespace octet::text {

struct Tokenizer::Data {
  struct Token {
    std::string text;   // as written in tokenizer.json
    std::string bytes;  // what it stands for
    bool exists = false;
    bool special = false;
    bool is_byte = false;  // <0xXX> under a ByteFallback decoder
  };

  std::string where;
  std::vector<Token> tokens;  // by id
  std::unordered_map<std::string, int32_t> added_ids;
  AddedTokenFinder raw_added, normalized_added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Bpe bpe;
  Decoder decoder;
  std::vector<int32_t> prefix, suffix;  // what the post-processor puts around a text

  std::optional<int32_t> bos_id, eos_id, pad_id;
  std::map<std::string, std::string, std::less<>> chat_templates;

  // From the text of tokenizer.json and tokenizer_config.json.
  static Data from_json(const JsonNode& root);
  void read_config(const JsonNode& root);

  const Token& token(int32_t id) const;  // an unknown id is an error
  std::optional<int32_t> find(std::string_view token) const;

 private:
  void set_token(const JsonNode& node, int32_t id, std::string text);
  void read_added_tokens(const JsonNode& node);
  void add_post_processor(const JsonNode& node);
};

}  // namespace octet::text
