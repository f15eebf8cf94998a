#include "text/jinja/parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>

#include "base/error.h"
#include "text/jinja/builtins.h"
#include "text/jinja/lexer.h"

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

class Parser {
 public:
  Parser(std::string_view source, std::string_view where)
      : where_(where), tokens_(tokenize(source, where)) {}

  Body run() {
    Body body = parse_body({});
    return body;
  }

 private:
  using ExprKind = Expression::Kind;
  using StmtKind = Statement::Kind;
  using TokenKind = Token::Kind;

  // ---- tokens
  const Token& current() const { return tokens_[at_]; }
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  [[noreturn]] void fail_here(std::string_view message) const {
    fail(where_, "line {}: {}", current().line, message);
  }
  std::string next_text() { return tokens_[at_++].text; }
  bool at_name(std::string_view name) const {
    return current().kind == TokenKind::kName && current().text == name;
  }
  bool at_operator(std::string_view text) const {
    return current().kind == TokenKind::kOperator && current().text == text;
  }
  bool accept_name(std::string_view name) { return at_name(name) && ++at_; }
  bool accept_operator(std::string_view text) { return at_operator(text) && ++at_; }
  void expect_operator(std::string_view text) {
    if (!accept_operator(text)) fail_expected(fmt::format("\"{}\"", text));
  }
  void expect_name(std::string_view name) {
    if (!accept_name(name)) fail_expected(fmt::format("\"{}\"", name));
  }
  void expect(TokenKind kind, std::string_view what) {
    if (current().kind != kind) fail_expected(what);
    ++at_;
  }
  std::string expect_identifier() {
    if (current().kind != TokenKind::kName) fail_expected("a name");
    return next_text();
  }
  [[noreturn]] void fail_expected(std::string_view what) const {
    const bool end = current().kind == TokenKind::kEnd;
    fail_here(fmt::format("{} is required, but here is {}{}{}", what, end ? "" : "\"",
                          end ? "the end of the template" : current().text, end ? "" : "\""));
  }

  // ---- expressions
  struct Nesting {  // counts the recursion of the parser itself
    explicit Nesting(Parser& parser) : parser(parser) {
      if (++parser.nesting_ > kMaxDepth) parser.fail_too_deep();
    }
    ~Nesting() { --parser.nesting_; }
    Parser& parser;
  };
  [[noreturn]] void fail_too_deep() const {
    fail_here(fmt::format("nesting must not be deeper than {}", kMaxDepth));
  }

  ExpressionPtr make(ExprKind kind, std::string name = "") const {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->name = std::move(name);
    return node;
  }
  void add_child(Expression& node, ExpressionPtr child) const {
    if (child != nullptr) node.depth = std::max(node.depth, child->depth + 1);
    if (node.depth > kMaxDepth) fail_too_deep();
    node.children.push_back(std::move(child));
  }
  template <class... Children>
  ExpressionPtr make_of(ExprKind kind, std::string name, Children... children) const {
    ExpressionPtr node = make(kind, std::move(name));
    (add_child(*node, std::move(children)), ...);
    return node;
  }

  ExpressionPtr parse_expression() {
    const Nesting nesting(*this);
    ExpressionPtr value = parse_binary(kLowest);
    while (accept_name("if")) {
      ExpressionPtr condition = parse_binary(kLowest);
      ExpressionPtr other = accept_name("else") ? parse_expression() : nullptr;
      value = make_of(ExprKind::kIf, "", std::move(value), std::move(condition), std::move(other));
    }
    return value;
  }

  // "a, b" as a tuple; a single expression as itself.
  ExpressionPtr parse_expression_list() {
    ExpressionPtr first = parse_expression();
    if (!at_operator(",")) return first;
    ExpressionPtr tuple = make_of(ExprKind::kTuple, "", std::move(first));
    while (accept_operator(",")) {
      if (at_end_of_list()) break;
      add_child(*tuple, parse_expression());
    }
    return tuple;
  }
  bool at_end_of_list() const {
    return current().kind == TokenKind::kPrintEnd || current().kind == TokenKind::kBlockEnd ||
           at_operator(")");
  }

  // The level of the binary operator that comes next, or 0.
  int next_level() const {
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
    if (text == "==" || text == "!=" || text == "<" || text == ">" || text == "<=" ||
        text == ">=") {
      return kCompareLevel;
    }
    if (text == "+" || text == "-") return kSumLevel;
    if (text == "~") return kConcatLevel;
    if (text == "*" || text == "/" || text == "//" || text == "%") return kProductLevel;
    return text == "**" ? kPowerLevel : 0;
  }

  ExpressionPtr parse_binary(int lowest) {
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

  ExpressionPtr parse_comparison(ExpressionPtr first) {
    ExpressionPtr node = make_of(ExprKind::kCompare, "", std::move(first));
    while (next_level() == kCompareLevel) {
      std::string operation = next_text();
      if (operation == "not") operation.append(1, ' ').append(next_text());
      node->operators.push_back(std::move(operation));
      add_child(*node, parse_binary(kSumLevel));
    }
    return node;
  }

  ExpressionPtr parse_unary(bool with_filters) {
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

  ExpressionPtr parse_primary() {
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

  ExpressionPtr constant(Value value) const {
    ExpressionPtr node = make(ExprKind::kConstant);
    node->value = std::move(value);
    return node;
  }

  ExpressionPtr parse_name() {
    std::string name = next_text();
    if (name == "true" || name == "True") return constant(Value(true));
    if (name == "false" || name == "False") return constant(Value(false));
    if (name == "none" || name == "None") return constant(Value(None{}));
    return make(ExprKind::kName, std::move(name));
  }

  ExpressionPtr parse_postfix(ExpressionPtr node) {
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

  ExpressionPtr parse_subscript(ExpressionPtr object) {
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
    return make_of(ExprKind::kSlice, "", std::move(object), std::move(parts[0]),
                   std::move(parts[1]), std::move(parts[2]));
  }

  // "(a, b, name=c)"
  void parse_arguments(Expression& node) {
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

  ExpressionPtr parse_filters(ExpressionPtr node) {
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

  // After "|"; a null input is the body of a block.
  ExpressionPtr parse_filter(ExpressionPtr input) {
    const std::string name = parse_dotted_name();
    if (!is_filter(name)) fail_here(fmt::format("there is no filter \"{}\"", name));
    ExpressionPtr filter = make_of(ExprKind::kFilter, name, std::move(input));
    if (at_operator("(")) parse_arguments(*filter);
    return filter;
  }

  std::string parse_dotted_name() {
    std::string name = expect_identifier();
    while (accept_operator(".")) name.append(1, '.').append(expect_identifier());
    return name;
  }

  ExpressionPtr parse_test(ExpressionPtr input) {
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
  bool at_argument_of_test() const {
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

  // ---- statements
  Statement statement(StmtKind kind) const {
    Statement result;
    result.kind = kind;
    result.line = current().line;
    return result;
  }
  void expect_block_end() { expect(TokenKind::kBlockEnd, "\"%}\""); }

  // Up to a tag that begins with one of `ends`, whose "{%" is passed and whose name is current.
  Body parse_body(std::initializer_list<std::string_view> ends) {
    const Nesting nesting(*this);
    Body body;
    while (true) {
      switch (current().kind) {
        case TokenKind::kEnd:
          if (ends.size() > 0) fail_expected(fmt::format("{{% {} %}}", *(ends.end() - 1)));
          return body;
        case TokenKind::kData: {
          Statement data = statement(StmtKind::kData);
          data.text = next_text();
          body.push_back(std::move(data));
          break;
        }
        case TokenKind::kPrintBegin: {
          Statement print = statement(StmtKind::kPrint);
          ++at_;
          print.expression = parse_expression_list();
          expect(TokenKind::kPrintEnd, "\"}}\"");
          body.push_back(std::move(print));
          break;
        }
        default:
          expect(TokenKind::kBlockBegin, "\"{%\"");
          if (std::find(ends.begin(), ends.end(), current().text) != ends.end()) return body;
          body.push_back(parse_statement());
      }
    }
  }
  // As above; passes the tag, which must be the last of `ends` or has nothing else in it.
  Body parse_body_until(std::string_view end) {
    Body body = parse_body({end});
    ++at_;
    expect_block_end();
    return body;
  }

  Statement parse_statement() {
    if (at_name("if")) return parse_if();
    if (at_name("for")) return parse_for();
    if (at_name("set")) return parse_set();
    if (at_name("macro")) return parse_macro();
    if (at_name("call")) return parse_call_block();
    if (at_name("filter")) return parse_filter_block();
    if (at_name("with")) return parse_with();
    if (at_name("generation")) {
      Statement scope = statement(StmtKind::kScope);
      ++at_;
      expect_block_end();
      scope.body = parse_body_until("endgeneration");
      return scope;
    }
    if (at_name("break") || at_name("continue")) {
      if (loops_ == 0) fail_here(fmt::format("\"{}\" stands in no loop", current().text));
      Statement jump = statement(at_name("break") ? StmtKind::kBreak : StmtKind::kContinue);
      ++at_;
      expect_block_end();
      return jump;
    }
    fail_here(fmt::format("there is no statement \"{}\" (or it ends nothing)", current().text));
  }

  Statement parse_if() {
    Statement result = statement(StmtKind::kIf);
    while (true) {
      ExpressionPtr condition;
      if (accept_name("if") || accept_name("elif")) {
        condition = parse_expression();
      } else {
        expect_name("else");
      }
      expect_block_end();
      const bool is_else = condition == nullptr;
      Body body = is_else ? parse_body({"endif"}) : parse_body({"elif", "else", "endif"});
      result.branches.emplace_back(std::move(condition), std::move(body));
      if (accept_name("endif")) break;
    }
    expect_block_end();
    return result;
  }

  // A name, a tuple of names or, in "set", an attribute of a name.
  ExpressionPtr parse_target(bool with_attribute) {
    const Nesting nesting(*this);
    const auto parse_one = [&]() -> ExpressionPtr {
      if (accept_operator("(")) {
        ExpressionPtr inner = parse_target(false);
        expect_operator(")");
        return inner;
      }
      return make(ExprKind::kName, expect_identifier());
    };
    ExpressionPtr first = parse_one();
    if (with_attribute && accept_operator(".")) {
      std::string name = expect_identifier();
      return make_of(ExprKind::kAttribute, std::move(name), std::move(first));
    }
    if (!at_operator(",")) return first;
    ExpressionPtr tuple = make_of(ExprKind::kTuple, "", std::move(first));
    while (accept_operator(",")) {
      if (at_name("in") || at_operator("=") || at_operator(")")) break;
      add_child(*tuple, parse_one());
    }
    return tuple;
  }

  Statement parse_for() {
    Statement result = statement(StmtKind::kFor);
    ++at_;
    result.target = parse_target(false);
    expect_name("in");
    result.expression = parse_binary(kLowest);
    if (accept_name("if")) result.condition = parse_expression();
    if (at_name("recursive")) fail_here("recursive loops are not supported");
    expect_block_end();
    ++loops_;
    result.body = parse_body({"else", "endfor"});
    --loops_;
    if (accept_name("else")) {
      expect_block_end();
      result.other = parse_body({"endfor"});
    }
    expect_name("endfor");
    expect_block_end();
    return result;
  }

  Statement parse_set() {
    Statement result = statement(StmtKind::kSet);
    ++at_;
    result.target = parse_target(true);
    if (accept_operator("=")) {
      result.expression = parse_expression_list();
      expect_block_end();
      return result;
    }
    result.kind = StmtKind::kSetBlock;
    if (accept_operator("|")) result.expression = parse_filters(parse_filter(nullptr));
    expect_block_end();
    result.body = parse_body_until("endset");
    return result;
  }

  // "(a, b=1)": names, and defaults where given.
  void parse_parameters(Statement& result) {
    expect_operator("(");
    while (!accept_operator(")")) {
      std::string name = expect_identifier();
      ExpressionPtr fallback = accept_operator("=") ? parse_expression() : nullptr;
      result.parameters.emplace_back(std::move(name), std::move(fallback));
      if (!at_operator(")")) expect_operator(",");
    }
  }

  // A body in which "break" would leave no loop of its own.
  Body parse_closed_body(std::string_view end) {
    const int outer = std::exchange(loops_, 0);
    Body body = parse_body_until(end);
    loops_ = outer;
    return body;
  }

  Statement parse_macro() {
    Statement result = statement(StmtKind::kMacro);
    ++at_;
    result.text = expect_identifier();
    parse_parameters(result);
    expect_block_end();
    result.body = parse_closed_body("endmacro");
    return result;
  }

  Statement parse_call_block() {
    Statement result = statement(StmtKind::kCallBlock);
    ++at_;
    if (at_operator("(")) parse_parameters(result);
    result.expression = parse_expression();
    if (result.expression->kind != ExprKind::kCall) fail_here("\"call\" needs a macro's call");
    expect_block_end();
    result.body = parse_closed_body("endcall");
    return result;
  }

  Statement parse_filter_block() {
    Statement result = statement(StmtKind::kFilter);
    ++at_;
    result.expression = parse_filters(parse_filter(nullptr));
    expect_block_end();
    result.body = parse_closed_body("endfilter");
    return result;
  }

  Statement parse_with() {
    Statement result = statement(StmtKind::kWith);
    ++at_;
    while (current().kind != TokenKind::kBlockEnd) {
      std::string name = expect_identifier();
      expect_operator("=");
      result.parameters.emplace_back(std::move(name), parse_expression());
      if (current().kind != TokenKind::kBlockEnd) expect_operator(",");
    }
    expect_block_end();
    result.body = parse_body_until("endwith");
    return result;
  }

  std::string where_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;
};

}  // namespace

Body parse_template(std::string_view source, std::string_view where) {
  return Parser(source, where).run();
}

}  // namespace octet::text::jinja
