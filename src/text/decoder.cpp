#include "text/decoder.h"

#include <charconv>
#include <cstdint>

#include "text/byte_level.h"

namespace octet::text {
namespace {

// The byte of "<0xXX>", or -1.
int parse_byte_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  uint8_t byte = 0;
  const char* end = token.data() + 5;
  const auto result = std::from_chars(token.data() + 3, end, byte, 16);
  return result.ec == std::errc() && result.ptr == end ? byte : -1;
}

}  // namespace

Decoder Decoder::from_json(const JsonNode& node) {
  Decoder decoder;
  decoder.add(node);
  return decoder;
}

void Decoder::add(const JsonNode& node) {
  const JsonNode type_node = node.at("type");
  const std::string& type = type_node.string();
  if (byte_level_) type_node.fail_must("absent, as nothing may follow ByteLevel");
  const auto must_precede_fuse = [&] {
    if (fused_) type_node.fail_must("Strip, the only decoder that may follow Fuse");
  };
  if (type == "Sequence") {
    node.at("decoders").for_each_element([&](const JsonNode& child) { add(child); });
  } else if (type == "ByteLevel") {
    must_precede_fuse();
    byte_level_ = true;
  } else if (type == "Replace") {
    must_precede_fuse();
    if (byte_fallback_) type_node.fail_must("placed before ByteFallback");
    const JsonNode pattern = node.at("pattern").at("String");
    if (pattern.string().empty()) pattern.fail_must("a text that is not empty");
    replacements_.emplace_back(pattern.string(), node.at("content").string());
  } else if (type == "ByteFallback") {
    must_precede_fuse();
    byte_fallback_ = true;
  } else if (type == "Fuse") {
    fused_ = true;
  } else if (type == "Strip") {
    if (!fused_) type_node.fail_must("placed after Fuse");
    const JsonNode content = node.at("content");
    if (content.string() != " ") content.fail_must("one space");
    node.at("stop").integer(0, 0);
    strips_leading_space_ = node.at("start").integer(0, 1) == 1;
  } else {
    type_node.fail_must(
        "a decoder that is known (ByteLevel, ByteFallback, Fuse, Replace, Strip, Sequence)");
  }
}

bool Decoder::is_byte_token(std::string_view token) const {
  return byte_fallback_ && parse_byte_token(token) >= 0;
}

std::string Decoder::token_bytes(std::string_view token) const {
  std::string text(token);
  for (const auto& [from, to] : replacements_) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
      text.replace(at, from.size(), to);
    }
  }
  if (byte_level_) {
    // Hugging Face takes a token with a character outside the alphabet as it is written.
    if (auto bytes = alphabet_to_bytes(text)) return *std::move(bytes);
  }
  if (is_byte_token(text)) return std::string(1, static_cast<char>(parse_byte_token(text)));
  return text;
}

}  // namespace octet::text
