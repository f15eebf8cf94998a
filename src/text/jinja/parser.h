// Parses a template: statements by recursive descent, expressions by precedence.
#pragma once

#include <string_view>

#include "text/jinja/ast.h"

namespace octet::text::jinja {

// Errors name `where` and the line.
Body parse_template(std::string_view source, std::string_view where);

}  // namespace octet::text::jinja
