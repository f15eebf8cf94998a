// Cuts a template into its plain text and the tokens of its tags, with Jinja's white space rules.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace octet::text::jinja {

struct Token {
  enum class Kind {
    kData,        // text between tags
    kPrintBegin,  // {{
    kPrintEnd,    // }}
    kBlockBegin,  // {%
    kBlockEnd,    // %}
    kName,
    kString,  // its value, without quotes and escapes
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  std::string text;
  int line = 0;
};

// With trim_blocks and lstrip_blocks, as transformers sets them. Errors name `where` and the line.
std::vector<Token> tokenize(std::string_view source, std::string_view where);

}  // namespace octet::text::jinja
