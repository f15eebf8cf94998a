// The decoder of a tokenizer.json: what bytes a token stands for.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/json_node.h"

namespace octet::text {

// ByteLevel, or a sequence of Replace, ByteFallback, Fuse and Strip of one leading space.
class Decoder {
 public:
  static Decoder from_json(const JsonNode& node);

  std::string token_bytes(std::string_view token) const;

  // Whether the token is a byte written as <0xXX> that is to be joined with its neighbours.
  bool is_byte_token(std::string_view token) const;
  bool byte_fallback() const { return byte_fallback_; }
  bool strips_leading_space() const { return strips_leading_space_; }

 private:
  void add(const JsonNode& node);

  std::vector<std::pair<std::string, std::string>> replacements_;
  bool byte_level_ = false;
  bool byte_fallback_ = false;
  bool fused_ = false;
  bool strips_leading_space_ = false;
};

}  // namespace octet::text
