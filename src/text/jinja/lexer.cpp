#include "text/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>

#include "base/error.h"
#include "text/utf8.h"

namespace octet::text::jinja {
namespace {

using Kind = Token::Kind;

constexpr std::string_view kSpaces = " \t\n\r\f\v";

bool is_name_start(char c) { return std::isalpha(static_cast<uint8_t>(c)) || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_part(char c) { return is_name_start(c) || is_digit(c); }

// Newlines become \n, and one at the very end goes.
std::string normalize_newlines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
    } else if (i + 1 == source.size() || source[i + 1] != '\n') {
      text += '\n';
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view where)
      : where_(where), text_(normalize_newlines(source)) {}

  std::vector<Token> run() {
    while (at_ < text_.size()) lex_data_and_tag();
    add(Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(std::string_view message) const {
    fail(where_, "line {}: {}", line_, message);
  }
  void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  bool looking_at(std::string_view prefix) const {
    return std::string_view(text_).substr(at_).starts_with(prefix);
  }
  void advance(size_t count) {
    line_ += static_cast<int>(std::count(text_.begin() + at_, text_.begin() + at_ + count, '\n'));
    at_ += count;
  }

  // Where the next "{{", "{%" or "{#" begins, or the end.
  size_t find_tag(size_t from) const {
    for (size_t i = text_.find('{', from); i != std::string::npos; i = text_.find('{', i + 1)) {
      if (i + 1 < text_.size() && std::string_view("{%#").find(text_[i + 1]) != std::string::npos) {
        return i;
      }
    }
    return text_.size();
  }

  // The text in front of a tag that begins at `tag`, cut as its sign and lstrip_blocks say.
  std::string_view strip_before(std::string_view data, size_t tag) const {
    const char sign = tag + 2 < text_.size() ? text_[tag + 2] : ' ';
    if (sign == '-') {
      const size_t last = data.find_last_not_of(kSpaces);
      return data.substr(0, last == std::string_view::npos ? 0 : last + 1);
    }
    if (sign == '+' || text_[tag + 1] == '{') return data;
    const size_t line_begin = data.rfind('\n') + 1;  // 0 where there is none
    const bool from_line_start = line_begin > 0 || at_ == 0 || text_[at_ - 1] == '\n';
    const bool blank = data.find_first_not_of(kSpaces, line_begin) == std::string_view::npos;
    return from_line_start && blank ? data.substr(0, line_begin) : data;
  }

  // Passes what ends a block or comment, e.g. "-%}" with the white space after it.
  void pass_end(std::string_view end) {
    const bool minus = text_[at_] == '-';
    const bool plus = text_[at_] == '+';
    advance(end.size() + (minus || plus));
    if (minus) {
      pass_spaces();
    } else if (!plus && looking_at("\n")) {
      advance(1);
    }
  }
  void pass_spaces() {
    const size_t next = text_.find_first_not_of(kSpaces, at_);
    advance((next == std::string::npos ? text_.size() : next) - at_);
  }
  bool at_end_of(std::string_view end) const {
    if (looking_at(end)) return true;
    return at_ < text_.size() && (text_[at_] == '-' || text_[at_] == '+') &&
           std::string_view(text_).substr(at_ + 1).starts_with(end);
  }

  void lex_data_and_tag() {
    const size_t tag = find_tag(at_);
    const std::string_view data = std::string_view(text_).substr(at_, tag - at_);
    const std::string_view kept = tag == text_.size() ? data : strip_before(data, tag);
    if (!kept.empty()) add(Kind::kData, std::string(kept));
    advance(tag - at_);
    if (at_ == text_.size()) return;
    const char type = text_[at_ + 1];
    const bool has_sign =
        at_ + 2 < text_.size() && (text_[at_ + 2] == '-' || text_[at_ + 2] == '+');
    advance(has_sign ? 3 : 2);
    if (type == '#') {
      const size_t end = text_.find("#}", at_);
      if (end == std::string::npos) fail_here("a comment \"{#\" has no \"#}\"");
      const bool signed_end = end > at_ && (text_[end - 1] == '-' || text_[end - 1] == '+');
      advance(end - at_ - signed_end);
      pass_end("#}");
    } else if (type == '{') {
      add(Kind::kPrintBegin, "{{");
      lex_tag("}}");
      add(Kind::kPrintEnd, "}}");
      const bool minus = text_[at_] == '-';
      advance(minus ? 3 : 2);
      if (minus) pass_spaces();
    } else {
      add(Kind::kBlockBegin, "{%");
      const size_t first = tokens_.size();
      lex_tag("%}");
      if (tokens_.size() == first + 1 && tokens_[first].text == "raw") {
        tokens_.resize(first - 1);
        return lex_raw();
      }
      add(Kind::kBlockEnd, "%}");
      pass_end("%}");
    }
  }

  // {% raw %}: everything up to {% endraw %} is text.
  void lex_raw() {
    const bool minus = text_[at_] == '-';  // the only sign that counts here; no newline is cut
    advance(minus || text_[at_] == '+' ? 3 : 2);
    if (minus) pass_spaces();
    for (size_t tag = find_tag(at_); tag < text_.size(); tag = find_tag(tag + 1)) {
      if (text_[tag + 1] != '%') continue;
      size_t name = tag + 2;
      if (name < text_.size() && (text_[name] == '-' || text_[name] == '+')) ++name;
      name = std::min(text_.find_first_not_of(kSpaces, name), text_.size());
      if (!std::string_view(text_).substr(name).starts_with("endraw")) continue;
      const std::string_view kept =
          strip_before(std::string_view(text_).substr(at_, tag - at_), tag);
      if (!kept.empty()) add(Kind::kData, std::string(kept));
      advance(name + 6 - at_);
      pass_spaces();
      if (!at_end_of("%}")) fail_here("\"endraw\" must be followed by \"%}\"");
      return pass_end("%}");
    }
    fail_here("{% raw %} has no {% endraw %}");
  }

  // The tokens up to `end`, which is not passed.
  void lex_tag(std::string_view end) {
    std::string open;  // the brackets not yet closed
    for (pass_spaces(); at_ < text_.size(); pass_spaces()) {
      // "}}" may also close two dicts, and "-" before an end is the end's.
      if (open.empty() && at_end_of(end) && !(end == "}}" && text_[at_] == '+')) return;
      const char c = text_[at_];
      if (is_name_start(c)) {
        size_t stop = at_;
        while (stop < text_.size() && is_name_part(text_[stop])) ++stop;
        add_and_pass(Kind::kName, stop);
      } else if (is_digit(c)) {
        lex_number();
      } else if (c == '"' || c == '\'') {
        lex_string(c);
      } else {
        lex_operator(open);
      }
    }
    fail_here(end == "}}" ? "\"{{\" has no \"}}\"" : "\"{%\" has no \"%}\"");
  }

  void add_and_pass(Kind kind, size_t stop) {
    add(kind, text_.substr(at_, stop - at_));
    advance(stop - at_);
  }

  void lex_number() {
    size_t stop = at_;
    Kind kind = Kind::kInteger;
    const auto pass_digits = [&] {
      while (stop < text_.size() && (is_digit(text_[stop]) || text_[stop] == '_')) ++stop;
    };
    const auto digit_at = [&](size_t i) { return i < text_.size() && is_digit(text_[i]); };
    const auto char_at = [&](size_t i) { return i < text_.size() ? text_[i] : ' '; };
    pass_digits();
    if (char_at(stop) == '.' && digit_at(stop + 1)) {
      kind = Kind::kFloat;
      ++stop;
      pass_digits();
    }
    if (char_at(stop) == 'e' || char_at(stop) == 'E') {
      const bool has_sign = char_at(stop + 1) == '+' || char_at(stop + 1) == '-';
      if (digit_at(stop + 1 + has_sign)) {
        kind = Kind::kFloat;
        stop += 1 + has_sign;
        pass_digits();
      }
    }
    add_and_pass(kind, stop);
    std::erase(tokens_.back().text, '_');
  }

  void lex_string(char quote) {
    std::string value;
    size_t i = at_ + 1;
    while (i < text_.size() && text_[i] != quote) {
      if (text_[i] == '\\' && i + 1 < text_.size()) {
        i = unescape(i + 1, value);
      } else {
        value += text_[i++];
      }
    }
    if (i >= text_.size()) fail_here("a string has no closing quote");
    add(Kind::kString, std::move(value));
    advance(i + 1 - at_);
  }

  // Python's escapes; `i` is after the backslash. Returns the place after the escape.
  size_t unescape(size_t i, std::string& value) const {
    const char c = text_[i];
    constexpr std::string_view kFrom = "\\'\"abfnrtv";
    if (const size_t known = kFrom.find(c); known != std::string_view::npos) {
      value += "\\'\"\a\b\f\n\r\t\v"[known];
      return i + 1;
    }
    if (c == '\n') return i + 1;
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    const bool octal = c >= '0' && c <= '7';
    if (digits == 0 && !octal) {
      value.append(1, '\\').append(1, c);
      return i + 1;
    }
    uint32_t code_point = 0;
    size_t end = i + !octal;
    const size_t limit = std::min(end + (octal ? 3 : digits), text_.size());
    for (; end < limit; ++end) {
      const char digit = text_[end];
      const int base = octal ? 8 : 16;
      const int number = is_digit(digit) ? digit - '0'
                         : std::isxdigit(static_cast<uint8_t>(digit)) != 0
                             ? (digit | 0x20) - 'a' + 10
                             : 99;
      if (number >= base) break;
      code_point = code_point * base + static_cast<uint32_t>(number);
    }
    if (!octal && end != i + 1 + digits) fail_here("a string has a broken escape");
    if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point < 0xE000)) {
      fail_here("a string has an escape that is no character");
    }
    append_utf8(value, code_point);
    return end;
  }

  void lex_operator(std::string& open) {
    constexpr std::array<std::string_view, 6> kLong = {"//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view operation : kLong) {
      if (looking_at(operation)) return add_and_pass(Kind::kOperator, at_ + 2);
    }
    const char c = text_[at_];
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      fail_here(fmt::format("\"{}\" is not part of the language",
                            std::string_view(text_).substr(at_, code_point_at(text_, at_).length)));
    }
    if (std::string_view("([{").find(c) != std::string_view::npos) {
      open += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (std::string_view(")]}").find(c) != std::string_view::npos) {
      if (open.empty() || open.back() != c) fail_here(fmt::format("\"{}\" closes nothing", c));
      open.pop_back();
    }
    add_and_pass(Kind::kOperator, at_ + 1);
  }

  std::string where_;
  std::string text_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, std::string_view where) {
  return Lexer(source, where).run();
}

}  // namespace octet::text::jinja
