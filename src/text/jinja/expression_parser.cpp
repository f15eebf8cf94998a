#include "text/jinja/expression_parser.h"

#include <array>
#include <charconv>

#include "base/error.h"
#include "text/jinja/builtins.h"

namespace octet::text::jinja {
namespace {

constexpr int kMaxDepth = 200;

// How tightly operators bind, in Jinja's order.
enum Precedence {
  kLowest = 1,
  kOrLevel = 1,
  kAndLevel,
  kNotLevel,
  kCompareLevel,
  kSumLevel,
  kConcatLevel,
  kProductLevel,
  kPowerLevel,
  kUnaryLevel
};

}  // namespace

ExpressionParser::Nesting::Nesting(ExpressionParser& parser) : parser(parser) {
  if (++parser.nesting_ > kMaxDepth) parser.fail_too_deep();
}

void ExpressionParser::expect_operator(std::string_view text) {
  if (!accept_operator(text)) fail_expected(fmt::format("\"{}\"", text));
}

void ExpressionParser::expect_name(std::string_view name) {
  if (!accept_name(name)) fail_expected(fmt::format("\"{}\"", name));
}

void ExpressionParser::expect(TokenKind kind, std::string_view what) {
  if (current().kind != kind) fail_expected(what);
  ++at_;
}

std::string ExpressionParser::expect_identifier() {
  if (current().kind != TokenKind::kName) fail_expected("a name");
  return next_text();
}

void ExpressionParser::fail_here(std::string_view message) const {
  fail(where_, "line {}: {}", current().line, message);
}

void ExpressionParser::fail_expected(std::string_view what) const {
  const bool end = current().kind == TokenKind::kEnd;
  fail_here(fmt::format("{} is required, but here is {}{}{}", what, end ? "" : "\"",
                        end ? "the end of the template" : current().text, end ? "" : "\""));
}

void ExpressionParser::fail_too_deep() const {
  fail_here(fmt::format("nesting must not be deeper than {}", kMaxDepth));
}

ExpressionPtr ExpressionParser::make(ExprKind kind, std::string name) const {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->name = std::move(name);
  return node;
}

void ExpressionParser::add_child(Expression& node, ExpressionPtr child) const {
  if (child != nullptr) node.depth = std::max(node.depth, child->depth + 1);
  if (node.depth > kMaxDepth) fail_too_deep();
  node.children.push_back(std::move(child));
}

ExpressionPtr ExpressionParser::parse_expression() {
  const Nesting nesting(*this);
  ExpressionPtr value = parse_operation();
  while (accept_name("if")) {
    ExpressionPtr condition = parse_operation();
    ExpressionPtr other = accept_name("else") ? parse_expression() : nullptr;
    value = make_of(ExprKind::kIf, "", std::move(value), std::move(condition), std::move(other));
  }
  return value;
}

ExpressionPtr ExpressionParser::parse_expression_list() {
  ExpressionPtr first = parse_expression();
  if (!at_operator(",")) return first;
  ExpressionPtr tuple = make_of(ExprKind::kTuple, "", std::move(first));
  while (accept_operator(",")) {
    if (at_end_of_list()) break;
    add_child(*tuple, parse_expression());
  }
  return tuple;
}

bool ExpressionParser::at_end_of_list() const {
  return current().kind == TokenKind::kPrintEnd || current().kind == TokenKind::kBlockEnd ||
         at_operator(")");
}

int ExpressionParser::next_level() const {
  if (current().kind == TokenKind::kName) {
    const std::string& name = current().text;
    if (name == "or") return kOrLevel;
    if (name == "and") return kAndLevel;
    if (name == "in") return kCompareLevel;
    if (name == "not" && peek().kind == TokenKind::kName && peek().text == "in") {
      return kCompareLevel;
    }
    return 0;
  }
  if (current().kind != TokenKind::kOperator) return 0;
  const std::string& text = current().text;
  if (text == "==" || text == "!=" || text == "<" || text == ">" || text == "<=" || text == ">=") {
    return kCompareLevel;
  }
  if (text == "+" || text == "-") return kSumLevel;
  if (text == "~") return kConcatLevel;
  if (text == "*" || text == "/" || text == "//" || text == "%") return kProductLevel;
  return text == "**" ? kPowerLevel : 0;
}

ExpressionPtr ExpressionParser::parse_operation() { return parse_binary(kLowest); }

ExpressionPtr ExpressionParser::parse_binary(int lowest) {
  const Nesting nesting(*this);
  ExpressionPtr left;
  if (lowest <= kNotLevel && accept_name("not")) {
    left = make_of(ExprKind::kUnary, "not", parse_binary(kNotLevel));
  } else {
    left = parse_unary(true);
  }
  for (int level = next_level(); level >= lowest && level > 0; level = next_level()) {
    if (level == kCompareLevel) {
      left = parse_comparison(std::move(left));
      continue;
    }
    const std::string operation = next_text();
    ExpressionPtr right = parse_binary(level + 1);
    if (level == kConcatLevel && left->kind == ExprKind::kConcat) {
      add_child(*left, std::move(right));  // a long chain stays flat
      continue;
    }
    const ExprKind kind = level == kOrLevel       ? ExprKind::kOr
                          : level == kAndLevel    ? ExprKind::kAnd
                          : level == kConcatLevel ? ExprKind::kConcat
                                                  : ExprKind::kBinary;
    left = make_of(kind, operation, std::move(left), std::move(right));
  }
  return left;
}

ExpressionPtr ExpressionParser::parse_comparison(ExpressionPtr first) {
  ExpressionPtr node = make_of(ExprKind::kCompare, "", std::move(first));
  while (next_level() == kCompareLevel) {
    std::string operation = next_text();
    if (operation == "not") operation.append(1, ' ').append(next_text());
    node->operators.push_back(std::move(operation));
    add_child(*node, parse_binary(kSumLevel));
  }
  return node;
}

ExpressionPtr ExpressionParser::parse_unary(bool with_filters) {
  const Nesting nesting(*this);
  ExpressionPtr node;
  if (at_operator("-") || at_operator("+")) {
    const std::string sign = next_text();
    node = make_of(ExprKind::kUnary, sign, parse_unary(false));
  } else {
    node = parse_primary();
  }
  node = parse_postfix(std::move(node));
  return with_filters ? parse_filters(std::move(node)) : std::move(node);
}

ExpressionPtr ExpressionParser::parse_primary() {
  const Token& token = current();
  switch (token.kind) {
    case TokenKind::kName:
      return parse_name();
    case TokenKind::kString: {
      std::string text = next_text();
      while (current().kind == TokenKind::kString) text += next_text();
      return constant(Value(std::move(text)));
    }
    case TokenKind::kInteger: {
      int64_t value = 0;
      const char* end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, value).ec != std::errc()) {
        fail_here("integers must fit 64 bits");
      }
      ++at_;
      return constant(Value(value));
    }
    case TokenKind::kFloat: {
      double value = 0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
      ++at_;
      return constant(Value(value));
    }
    default:
      break;
  }
  if (accept_operator("(")) {
    if (accept_operator(")")) return make(ExprKind::kTuple);
    ExpressionPtr inner = parse_expression_list();
    expect_operator(")");
    return inner;
  }
  if (accept_operator("[")) {
    ExpressionPtr list = make(ExprKind::kList);
    while (!accept_operator("]")) {
      add_child(*list, parse_expression());
      if (!at_operator("]")) expect_operator(",");
    }
    return list;
  }
  if (accept_operator("{")) {
    ExpressionPtr dict = make(ExprKind::kDict);
    while (!accept_operator("}")) {
      add_child(*dict, parse_expression());
      expect_operator(":");
      add_child(*dict, parse_expression());
      if (!at_operator("}")) expect_operator(",");
    }
    return dict;
  }
  fail_expected("an expression");
}

ExpressionPtr ExpressionParser::constant(Value value) const {
  ExpressionPtr node = make(ExprKind::kConstant);
  node->value = std::move(value);
  return node;
}

ExpressionPtr ExpressionParser::parse_name() {
  std::string name = next_text();
  if (name == "true" || name == "True") return constant(Value(true));
  if (name == "false" || name == "False") return constant(Value(false));
  if (name == "none" || name == "None") return constant(Value(None{}));
  return make(ExprKind::kName, std::move(name));
}

ExpressionPtr ExpressionParser::parse_postfix(ExpressionPtr node) {
  while (true) {
    if (accept_operator(".")) {
      if (current().kind == TokenKind::kInteger) {
        node = make_of(ExprKind::kItem, "", std::move(node), parse_primary());
      } else {
        std::string name = expect_identifier();
        node = make_of(ExprKind::kAttribute, std::move(name), std::move(node));
      }
    } else if (accept_operator("[")) {
      node = parse_subscript(std::move(node));
    } else if (at_operator("(")) {
      node = make_of(ExprKind::kCall, "", std::move(node));
      parse_arguments(*node);
    } else {
      return node;
    }
  }
}

ExpressionPtr ExpressionParser::parse_subscript(ExpressionPtr object) {
  std::array<ExpressionPtr, 3> parts;  // begin, end, step
  size_t part = 0;
  bool is_slice = false;
  while (!at_operator("]")) {
    if (accept_operator(":")) {
      is_slice = true;
      if (++part == parts.size()) fail_here("a slice has at most three parts");
    } else if (parts[part] == nullptr) {
      parts[part] = parse_expression();
    } else {
      fail_expected("\"]\"");
    }
  }
  if (!is_slice && parts[0] == nullptr) fail_expected("an index");
  expect_operator("]");
  if (!is_slice) return make_of(ExprKind::kItem, "", std::move(object), std::move(parts[0]));
  return make_of(ExprKind::kSlice, "", std::move(object), std::move(parts[0]), std::move(parts[1]),
                 std::move(parts[2]));
}

void ExpressionParser::parse_arguments(Expression& node) {
  expect_operator("(");
  while (!accept_operator(")")) {
    if (current().kind == TokenKind::kName && peek().kind == TokenKind::kOperator &&
        peek().text == "=") {
      std::string name = next_text();
      ++at_;
      ExpressionPtr value = parse_expression();
      node.depth = std::max(node.depth, value->depth + 1);
      node.named.emplace_back(std::move(name), std::move(value));
    } else {
      if (!node.named.empty()) fail_here("an argument without a name stands after named ones");
      add_child(node, parse_expression());
    }
    if (!at_operator(")")) expect_operator(",");
  }
  if (node.depth > kMaxDepth) fail_too_deep();
}

ExpressionPtr ExpressionParser::parse_filters(ExpressionPtr node) {
  while (true) {
    if (accept_operator("|")) {
      node = parse_filter(std::move(node));
    } else if (accept_name("is")) {
      node = parse_test(std::move(node));
    } else if (at_operator("(")) {
      node = make_of(ExprKind::kCall, "", std::move(node));
      parse_arguments(*node);
    } else {
      return node;
    }
  }
}

ExpressionPtr ExpressionParser::parse_filter(ExpressionPtr input) {
  const std::string name = parse_dotted_name();
  if (!is_filter(name)) fail_here(fmt::format("there is no filter \"{}\"", name));
  ExpressionPtr filter = make_of(ExprKind::kFilter, name, std::move(input));
  if (at_operator("(")) parse_arguments(*filter);
  return filter;
}

std::string ExpressionParser::parse_dotted_name() {
  std::string name = expect_identifier();
  while (accept_operator(".")) name.append(1, '.').append(expect_identifier());
  return name;
}

ExpressionPtr ExpressionParser::parse_test(ExpressionPtr input) {
  const bool negated = accept_name("not");
  const std::string name = parse_dotted_name();
  if (!is_test(name)) fail_here(fmt::format("there is no test \"{}\"", name));
  ExpressionPtr test = make_of(ExprKind::kTest, name, std::move(input));
  if (at_operator("(")) {
    parse_arguments(*test);
  } else if (at_argument_of_test()) {
    add_child(*test, parse_postfix(parse_primary()));
  }
  return negated ? make_of(ExprKind::kUnary, "not", std::move(test)) : std::move(test);
}
// A test's only argument may stand without parentheses: "x is divisibleby 3".
bool ExpressionParser::at_argument_of_test() const {
  switch (current().kind) {
    case TokenKind::kName:
      return !at_name("else") && !at_name("or") && !at_name("and") && !at_name("if") &&
             !at_name("is") && !at_name("in") && !at_name("not");
    case TokenKind::kString:
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return true;
    default:
      return at_operator("[") || at_operator("{");
  }
}

}  // namespace octet::text::jinja
