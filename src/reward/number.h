// Numbers in text, compared exactly.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace octet::reward {

// A rational number as two whole numbers in decimal digits without leading zeros; 0 is "" over one.
struct Number {
  bool negative = false;
  std::string numerator;
  std::string denominator;  // not 0
};

bool operator==(const Number& a, const Number& b);

// The number that the whole of `text` is, blanks and a final "%" aside: an optional sign and "$",
// then digits with commas and a decimal point (a trailing one is ignored), or two of these with "/"
// between. Nothing where it is none, or longer than 200 characters.
std::optional<Number> parse_number(std::string_view text);

// The last number anywhere in `text`. A "-" after a letter, digit or ")" is taken as an operator.
std::optional<Number> last_number(std::string_view text);

// The number that `text` begins with.
std::optional<Number> leading_number(std::string_view text);

}  // namespace octet::reward
