#include "reward/latex.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "base/strings.h"
#include "reward/number.h"

namespace octet::reward {
namespace {

constexpr size_t kNone = std::string_view::npos;

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// Where the brace opened at `open` closes; kNone where it does not.
size_t closing_brace(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '{') {
      ++depth;
    } else if (text[i] == '}' && --depth == 0) {
      return i;
    }
  }
  return kNone;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != kNone; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// \frac12 → \frac{1}{2} and \sqrt3 → \sqrt{3}: braces around single-character arguments.
std::string brace_arguments(const std::string& text, std::string_view command, int num_arguments) {
  std::string result;
  size_t at = 0;
  for (size_t found; (found = text.find(command, at)) != kNone;) {
    size_t end = found + command.size();
    result.append(text, at, end - at);
    for (int i = 0; i < num_arguments && end < text.size(); ++i) {
      if (text[end] == '{') {
        const size_t close = closing_brace(text, end);
        if (close == kNone) break;
        // The argument may hold the command again.
        result += '{';
        result += brace_arguments(text.substr(end + 1, close - end - 1), command, num_arguments);
        result += '}';
        end = close + 1;
      } else if (std::isalnum(static_cast<unsigned char>(text[end]))) {
        result += '{';
        result += text[end++];
        result += '}';
      } else {
        break;
      }
    }
    at = end;
  }
  return result.append(text, at, kNone);
}

// The trailing \text{…} of a unit ("5\text{ cm}") goes; one that is the whole answer stays.
void drop_unit(std::string& text) {
  const size_t at = text.rfind("\\text{");
  if (at == kNone || at == 0) return;
  if (closing_brace(text, at + 5) == text.size() - 1) text.erase(at);
}

void drop_thousands_commas(std::string& text) {
  const size_t first = text.starts_with('-') ? 1 : 0;
  const size_t end = std::min(text.find('.'), text.size());
  std::string digits;
  for (size_t i = first; i < end; ++i) {
    const bool is_comma_place = i > first && (end - i) % 4 == 0;
    if (is_comma_place ? text[i] != ',' : !is_digit(text[i])) return;
    if (!is_comma_place) digits += text[i];
  }
  text.replace(first, end - first, digits);
}

void spell_simple_fraction(std::string& text) {
  const size_t slash = text.find('/');
  if (slash == kNone || slash + 1 == text.size()) return;
  const size_t first = text.starts_with('-') ? 1 : 0;
  if (slash <= first) return;
  for (size_t i = first; i < text.size(); ++i) {
    if (i != slash && !is_digit(text[i])) return;
  }
  text = text.substr(0, first) + "\\frac{" + text.substr(first, slash - first) + "}{" +
         text.substr(slash + 1) + "}";
}

// Of a normalised answer; a comma left in it separates the parts of a list.
std::optional<Number> latex_number(std::string text) {
  if (text.find(',') != kNone) return std::nullopt;
  const size_t at = text.find("\\frac{");
  if (at != kNone && at <= 1 && text.ends_with('}')) {
    const size_t middle = text.find("}{", at);
    if (middle == kNone) return std::nullopt;
    text = text.substr(0, at) + text.substr(at + 6, middle - at - 6) + '/' +
           text.substr(middle + 2, text.size() - middle - 3);
  }
  return parse_number(text);
}

}  // namespace

std::optional<std::string> last_boxed(std::string_view text) {
  struct Open {
    size_t begin;
    bool boxed;
  };
  std::vector<Open> opens;
  std::optional<Open> best;
  size_t best_end = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {
      const std::string_view rest = text.substr(i);
      const size_t length = rest.starts_with("\\boxed{") ? 7 : rest.starts_with("\\fbox{") ? 6 : 0;
      if (length > 0) opens.push_back({i + length, true});
      i += std::max<size_t>(length, 2) - 1;
    } else if (text[i] == '{') {
      opens.push_back({i + 1, false});
    } else if (text[i] == '}' && !opens.empty()) {
      const Open open = opens.back();
      opens.pop_back();
      if (!open.boxed || (best && best->begin > open.begin)) continue;
      best = open;
      best_end = i;
    }
  }
  if (!best) return std::nullopt;
  return std::string(text.substr(best->begin, best_end - best->begin));
}

std::string normalize_latex(std::string_view given) {
  constexpr size_t kMaxLength = 1000;  // no answer is longer; bounds the work on nested fractions
  std::string text(trim(given));
  if (text.size() > kMaxLength) return text;
  for (const std::string_view dropped :
       {"\\left", "\\right", "\\!", "\\,", "\\;", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%"}) {
    replace_all(text, dropped, "");
  }
  replace_all(text, "\\dfrac", "\\frac");
  replace_all(text, "\\tfrac", "\\frac");
  text = std::string(trim(text));
  if (text.ends_with('.')) text.pop_back();
  drop_unit(text);
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  if (const size_t equals = text.find('='); equals != kNone && equals <= 2) {
    text.erase(0, equals + 1);
  }
  text = brace_arguments(text, "\\frac", 2);
  text = brace_arguments(text, "\\sqrt", 1);
  if (text.starts_with('.')) text.insert(text.begin(), '0');
  drop_thousands_commas(text);
  spell_simple_fraction(text);
  return text;
}

bool same_latex_answer(std::string_view a, std::string_view b) {
  const std::string left = normalize_latex(a);
  const std::string right = normalize_latex(b);
  if (left == right) return true;
  const std::optional<Number> number = latex_number(left);
  return number && number == latex_number(right);
}

}  // namespace octet::reward
