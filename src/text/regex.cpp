#include "text/regex.h"

#include <string>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "text/utf8.h"

namespace octet::text {
namespace {

std::string message_of(int error) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(error, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

Regex::Regex(std::string_view pattern, Syntax syntax, std::string_view where) {
  const uint32_t options =
      PCRE2_UTF |
      (syntax == Syntax::kLiteral ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options, &error, &offset, nullptr);
  if (code == nullptr) {
    fail(where, "a regular expression is required, but \"{}\" is none at offset {}: {}", pattern,
         offset, message_of(error));
  }
  code_ = std::shared_ptr<const void>(
      code, [](const void* p) { pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p))); });
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it fails, the interpreter is used
}

void Regex::for_each_match(std::string_view text,
                           const std::function<void(size_t, size_t)>& on_match) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  if (match == nullptr) throw std::bad_alloc();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const auto find = [&](size_t from, uint32_t options) {
    return pcre2_match(code, subject, text.size(), from, options | PCRE2_NO_UTF_CHECK, match.get(),
                       nullptr);
  };
  for (size_t from = 0; from <= text.size();) {
    int result = find(from, 0);
    // The JIT's stack is small; the interpreter keeps its state on the heap.
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = find(from, PCRE2_NO_JIT);
    if (result == PCRE2_ERROR_NOMATCH) return;
    if (result < 0) {
      fail("tokenizer", "the pre-tokenizer's regular expression gave up at byte {} of {}: {}", from,
           text.size(), message_of(result));
    }
    const size_t* bounds = pcre2_get_ovector_pointer(match.get());
    on_match(bounds[0], bounds[1]);
    from = bounds[1];
    if (bounds[1] <= bounds[0]) {  // an empty match: go on after the next character
      from = bounds[0] + (bounds[0] < text.size() ? code_point_at(text, bounds[0]).length : 1);
    }
  }
}

}  // namespace octet::text
