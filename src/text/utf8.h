// UTF-8 by hand: code points, and what to do where bytes are no UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace octet::text {

struct CodePoint {
  char32_t value = 0xFFFD;
  // Bytes taken, at least 1. Where they are no UTF-8: the longest part that could have begun a
  // character, which one U+FFFD replaces (Unicode's "maximal subpart", as Rust's from_utf8_lossy).
  size_t length = 1;
  bool valid = false;
  bool cut_short = false;  // not valid, but more bytes could make it so
};

// The code point at text[position]; `position` must lie within the text.
CodePoint code_point_at(std::string_view text, size_t position);
// The code point that ends before text[end]; the text must be valid and end > 0.
CodePoint code_point_before(std::string_view text, size_t end);

void append_utf8(std::string& text, char32_t code_point);

// The offset of the first byte that is no UTF-8, or npos.
size_t find_invalid_utf8(std::string_view text);

// Moves what is complete from `bytes` to `out`, with U+FFFD for what is no UTF-8. Unless `final`,
// the beginning of a character at the end stays in `bytes`.
void move_lossy_utf8(std::string& bytes, std::string& out, bool final);

// \w and \s of the regexes that added tokens are matched with.
bool is_word_character(char32_t code_point);
bool is_space(char32_t code_point);

}  // namespace octet::text
