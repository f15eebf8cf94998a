#include "text/normalizer.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include <utf8proc.h>

#include "base/error.h"
#include "text/utf8.h"

namespace octet::text {
namespace {

// By hand but for the tables: utf8proc_map takes quadratic time on long runs of combining marks.
// Source: Unicode Standard Annex 15.
std::string normalize_unicode(std::string_view text, int options) {
  // Nothing below U+0300 (lead byte 0xCC) changes under NFC; ASCII never does.
  const bool is_nfc = options == UTF8PROC_COMPOSE;
  if (std::all_of(text.begin(), text.end(),
                  [&](char c) { return static_cast<uint8_t>(c) < (is_nfc ? 0xCC : 0x80); })) {
    return std::string(text);
  }
  const auto flags = static_cast<utf8proc_option_t>(options | UTF8PROC_STABLE);
  std::vector<utf8proc_int32_t> points;
  for (size_t i = 0; i < text.size();) {
    const CodePoint next = code_point_at(text, i);
    utf8proc_int32_t parts[32];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(next.value), parts,
                                               std::size(parts), flags, &boundary);
    OCTET_ASSERT(count >= 0 && count <= std::ssize(parts));
    points.insert(points.end(), parts, parts + count);
    i += next.length;
  }
  // Marks that follow one character are put in the order of their classes.
  const auto mark_class = [](utf8proc_int32_t point) {
    return utf8proc_get_property(point)->combining_class;
  };
  for (auto begin = points.begin(); begin != points.end();) {
    begin = std::find_if(begin, points.end(), mark_class);
    const auto end =
        std::find_if(begin, points.end(), [&](auto point) { return mark_class(point) == 0; });
    std::stable_sort(begin, end, [&](auto a, auto b) { return mark_class(a) < mark_class(b); });
    begin = end;
  }
  const auto length =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), flags);
  std::string result;
  for (utf8proc_ssize_t i = 0; i < length; ++i) {
    append_utf8(result, static_cast<char32_t>(points[i]));
  }
  return result;
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
  const std::string type = node.at("type").string();
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
