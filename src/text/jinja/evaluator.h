// Runs the tree of a template.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"

namespace octet::text::jinja {

// The text that the template prints with these variables; later ones hide earlier ones. Errors name
// `where` and the line.
std::string render_template(const Body& body, std::vector<std::pair<std::string, Value>> variables,
                            std::string_view where);

}  // namespace octet::text::jinja
