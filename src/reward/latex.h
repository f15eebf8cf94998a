// Answers written in LaTeX, as the MATH problems have them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace octet::reward {

// What stands in the last \boxed{…} or \fbox{…} whose braces close; escaped braces do not count.
std::optional<std::string> last_boxed(std::string_view text);

// One spelling for answers that mean the same: no blanks, \left, \right, \!, $, %, degree signs or
// trailing \text{unit}; \dfrac, \tfrac and \frac12 as \frac{1}{2}; \sqrt3 as \sqrt{3}; a/b of whole
// numbers as \frac{a}{b}; "x = 5" as "5"; ".5" as "0.5"; commas between thousands dropped. After
// the rules of Hendrycks et al., "Measuring mathematical problem solving with the MATH dataset"
// (2021).
std::string normalize_latex(std::string_view text);

// Equal after normalisation, or equal as numbers.
bool same_latex_answer(std::string_view a, std::string_view b);

}  // namespace octet::reward
