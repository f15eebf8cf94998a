// Texts as Python's string methods make them.
#include <cstdint>

#include <utf8proc.h>

#include "text/jinja/builtins.h"
#include "text/utf8.h"

namespace octet::text::jinja {
namespace {

template <class Map>
std::string map_code_points(std::string_view text, const Map& map) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint next = code_point_at(text, i);
    append_utf8(result, map(next.value));
    i += next.length;
  }
  return result;
}

char32_t to_lower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_upper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}

}  // namespace

std::string lower(std::string_view text) { return map_code_points(text, to_lower); }
std::string upper(std::string_view text) { return map_code_points(text, to_upper); }

std::string capitalize(std::string_view text) {
  bool first = true;
  return map_code_points(
      text, [&](char32_t c) { return std::exchange(first, false) ? to_upper(c) : to_lower(c); });
}

std::string title(std::string_view text) {
  bool in_word = false;
  return map_code_points(text, [&](char32_t c) {
    const char32_t mapped = in_word ? to_lower(c) : to_upper(c);
    in_word = to_lower(c) != to_upper(c);
    return mapped;
  });
}

std::string_view strip(std::string_view text, const Value& characters, bool left, bool right) {
  std::u32string set;
  const bool spaces = characters.is_none();
  if (!spaces) {
    const std::string& given = characters.text("what is stripped");
    for (size_t i = 0; i < given.size(); i += code_point_at(given, i).length) {
      set += code_point_at(given, i).value;
    }
  }
  const auto is_stripped = [&](char32_t c) {
    // Python takes the four separators U+001C to U+001F for white space, too.
    return spaces ? is_space(c) || (c >= 0x1C && c <= 0x1F) : set.find(c) != std::u32string::npos;
  };
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    const CodePoint next = code_point_at(text, begin);
    if (!is_stripped(next.value)) break;
    begin += next.length;
  }
  while (right && begin < end) {
    const CodePoint last = code_point_before(text, end);
    if (!is_stripped(last.value)) break;
    end -= last.length;
  }
  return text.substr(begin, end - begin);
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t count) {
  std::string result;
  size_t at = 0;
  const auto check_size = [&] {
    if (result.size() > kMaxBytes) value_error("a text grew beyond {} bytes", kMaxBytes);
  };
  while (count != 0) {
    // An empty text is found in front of every character and at the end.
    const size_t found = from.empty() ? at : text.find(from, at);
    if (found == std::string_view::npos) break;
    result.append(text, at, found - at).append(to);
    check_size();
    at = found + from.size();
    --count;
    if (from.empty()) {
      if (at == text.size()) break;
      const size_t length = code_point_at(text, at).length;
      result.append(text, at, length);
      at += length;
    }
  }
  if (at < text.size()) result.append(text, at);
  check_size();
  return result;
}

std::string join(const std::vector<Value>& items, std::string_view separator) {
  std::string result;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) result += separator;
    result += items[i].str();
    if (result.size() > kMaxBytes) value_error("a text grew beyond {} bytes", kMaxBytes);
  }
  return result;
}

}  // namespace octet::text::jinja
