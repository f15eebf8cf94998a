#include "text/normalizer.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include <utf8proc.h>

#include "base/error.h"

namespace octet::text {
namespace {

std::string normalize_unicode(std::string_view text, int options) {
  // Nothing below U+0300 (lead byte 0xCC) changes under NFC.
  const bool plain = std::all_of(text.begin(), text.end(), [&](char c) {
    return static_cast<uint8_t>(c) <
           ((options & UTF8PROC_COMPAT) == 0 && (options & UTF8PROC_COMPOSE) != 0 ? 0xCC : 0x80);
  });
  if (plain) return std::string(text);
  utf8proc_uint8_t* buffer = nullptr;
  const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &buffer,
                                   static_cast<utf8proc_option_t>(options | UTF8PROC_STABLE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(buffer, std::free);
  if (length < 0) fail("tokenizer", "the text cannot be normalised: {}", utf8proc_errmsg(length));
  return std::string(reinterpret_cast<const char*>(buffer), static_cast<size_t>(length));
}

}  // namespace

Regex pattern_from_json(const JsonNode& node) {
  if (const auto regex = node.find("Regex")) {
    return Regex(regex->string(), Regex::Syntax::kPattern, node.where());
  }
  return Regex(node.at("String").string(), Regex::Syntax::kLiteral, node.where());
}

std::string replace_all(std::string_view text, const Regex& pattern, std::string_view content) {
  std::string result;
  size_t copied = 0;
  pattern.for_each_match(text, [&](size_t begin, size_t end) {
    result.append(text, copied, begin - copied).append(content);
    copied = end;
  });
  return result.append(text, copied);
}

Normalizer Normalizer::from_json(const std::optional<JsonNode>& node) {
  Normalizer result;
  if (node) result.add(*node);
  return result;
}

void Normalizer::add(const JsonNode& node) {
  const std::string& type = node.at("type").string();
  if (type == "Sequence") {
    node.at("normalizers").for_each_element([&](const JsonNode& child) { add(child); });
  } else if (type == "NFC") {
    steps_.push_back({Step::Kind::kUnicode, UTF8PROC_COMPOSE});
  } else if (type == "NFD") {
    steps_.push_back({Step::Kind::kUnicode, UTF8PROC_DECOMPOSE});
  } else if (type == "NFKC") {
    steps_.push_back({Step::Kind::kUnicode, UTF8PROC_COMPOSE | UTF8PROC_COMPAT});
  } else if (type == "NFKD") {
    steps_.push_back({Step::Kind::kUnicode, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT});
  } else if (type == "Prepend") {
    steps_.push_back({Step::Kind::kPrepend, 0, node.at("prepend").string()});
  } else if (type == "Replace") {
    steps_.push_back({Step::Kind::kReplace, 0, node.at("content").string(),
                      pattern_from_json(node.at("pattern"))});
  } else {
    node.at("type").fail_must(
        "a normalizer that is known (NFC, NFD, NFKC, NFKD, Prepend, Replace, "
        "Sequence)");
  }
}

std::string Normalizer::apply(std::string text) const {
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kUnicode:
        text = normalize_unicode(text, step.unicode_options);
        break;
      case Step::Kind::kPrepend:
        if (!text.empty()) text.insert(0, step.content);
        break;
      case Step::Kind::kReplace:
        text = replace_all(text, *step.pattern, step.content);
        break;
    }
  }
  return text;
}

}  // namespace octet::text
