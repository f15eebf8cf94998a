// Regular expressions over UTF-8 with Unicode classes, by PCRE2.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

namespace octet::text {

// Compiled once; matching is thread-safe.
class Regex {
 public:
  enum class Syntax { kPattern, kLiteral };

  // A pattern that PCRE2 refuses is an error that names `where`.
  Regex(std::string_view pattern, Syntax syntax, std::string_view where);

  // Calls on_match(begin, end) for the matches from left to right, none overlapping. The text must
  // be valid UTF-8.
  void for_each_match(std::string_view text,
                      const std::function<void(size_t, size_t)>& on_match) const;

 private:
  std::shared_ptr<const void> code_;
};

}  // namespace octet::text
