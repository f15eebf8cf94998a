#include "reward/number.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "base/strings.h"

namespace octet::reward {
namespace {

constexpr size_t kMaxLength = 200;                       // keeps the exact products small
constexpr std::string_view kMinusSign = "\xE2\x88\x92";  // U+2212

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_number_char(char c) { return is_digit(c) || c == '.' || c == ','; }

std::string without_leading_zeros(std::string digits) {
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  return digits;
}

// Digits times 10^-scale.
struct Decimal {
  std::string digits;
  size_t scale = 0;
};

// Of a run of digits, commas and points.
std::optional<Decimal> parse_decimal(std::string_view run) {
  while (!run.empty() && !is_digit(run.back())) run.remove_suffix(1);
  if (run.starts_with("..")) run.remove_prefix(run.find_first_not_of('.'));  // an ellipsis
  if (run.empty() || run.size() > kMaxLength) return std::nullopt;
  Decimal decimal;
  bool after_point = false;
  for (const char c : run) {
    if (c == ',') continue;
    if (c == '.') {
      if (after_point) return std::nullopt;
      after_point = true;
      continue;
    }
    decimal.digits += c;
    decimal.scale += after_point;
  }
  return decimal;
}

std::string product(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return "";
  std::vector<int> places(a.size() + b.size());  // the lowest last
  for (size_t i = a.size(); i-- > 0;) {
    for (size_t j = b.size(); j-- > 0;) places[i + j + 1] += (a[i] - '0') * (b[j] - '0');
  }
  std::string digits(places.size(), '0');
  int carry = 0;
  for (size_t i = places.size(); i-- > 0;) {
    carry += places[i];
    digits[i] = static_cast<char>('0' + carry % 10);
    carry /= 10;
  }
  return without_leading_zeros(std::move(digits));
}

// Reads a number at `*position` and moves past it; where there is none, leaves `*position`.
std::optional<Number> read_number(std::string_view text, size_t* position) {
  size_t at = *position;
  bool negative = false;
  if (text.substr(at).starts_with(kMinusSign)) {
    negative = true;
    at += kMinusSign.size();
  } else if (at < text.size() && (text[at] == '-' || text[at] == '+')) {
    negative = text[at] == '-';
    ++at;
  }
  if (at < text.size() && text[at] == '$') ++at;
  const auto read_run = [&](size_t begin) {
    size_t end = begin;
    while (end < text.size() && is_number_char(text[end])) ++end;
    return text.substr(begin, end - begin);
  };
  const std::string_view run = read_run(at);
  const std::optional<Decimal> top = parse_decimal(run);
  if (!top) return std::nullopt;
  at += run.size();
  Decimal bottom{"1", 0};
  if (at < text.size() && text[at] == '/' && is_digit(run.back())) {
    const std::string_view run_below = read_run(at + 1);
    const std::optional<Decimal> below = parse_decimal(run_below);
    if (below && !without_leading_zeros(below->digits).empty()) {
      bottom = *below;
      at += 1 + run_below.size();
    }
  }
  Number number;
  number.numerator = without_leading_zeros(top->digits + std::string(bottom.scale, '0'));
  number.denominator = without_leading_zeros(bottom.digits + std::string(top->scale, '0'));
  number.negative = negative && !number.numerator.empty();
  *position = at;
  return number;
}

}  // namespace

bool operator==(const Number& a, const Number& b) {
  return a.negative == b.negative &&
         product(a.numerator, b.denominator) == product(b.numerator, a.denominator);
}

std::optional<Number> parse_number(std::string_view text) {
  text = trim(text);
  if (text.ends_with('%')) text = trim(text.substr(0, text.size() - 1));
  size_t end = 0;
  const std::optional<Number> number = read_number(text, &end);
  return end == text.size() ? number : std::nullopt;
}

std::optional<Number> leading_number(std::string_view text) {
  size_t position = 0;
  return read_number(text, &position);
}

std::optional<Number> last_number(std::string_view text) {
  std::optional<Number> last;
  for (size_t at = 0; at < text.size();) {
    const char before = at == 0 ? ' ' : text[at - 1];
    const bool follows_operand = std::isalnum(static_cast<unsigned char>(before)) || before == ')';
    const bool is_operator = follows_operand && !is_number_char(text[at]);
    size_t end = at;
    if (const auto number = is_operator ? std::nullopt : read_number(text, &end)) {
      last = number;
      at = end;
    } else if (is_number_char(text[at])) {  // a run that is no number: none of it counts
      while (at < text.size() && is_number_char(text[at])) ++at;
    } else {
      ++at;
    }
  }
  return last;
}

}  // namespace octet::reward
