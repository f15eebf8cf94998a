// The parser's lower half: the tokens, and expressions by precedence. parser.cpp adds statements.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace octet::text::jinja {

class ExpressionParser {
 protected:
  using ExprKind = Expression::Kind;
  using TokenKind = Token::Kind;

  // Errors name `where` and the line.
  ExpressionParser(std::string_view source, std::string_view where)
      : where_(where), tokens_(tokenize(source, where)) {}

  struct Nesting {  // counts the recursion of the parser itself
    explicit Nesting(ExpressionParser& parser);
    ~Nesting() { --parser.nesting_; }
    ExpressionParser& parser;
  };

  const Token& current() const { return tokens_[at_]; }
  void advance() { ++at_; }
  std::string next_text() { return tokens_[at_++].text; }
  bool at_name(std::string_view name) const {
    return current().kind == TokenKind::kName && current().text == name;
  }
  bool at_operator(std::string_view text) const {
    return current().kind == TokenKind::kOperator && current().text == text;
  }
  bool accept_name(std::string_view name) { return at_name(name) && ++at_; }
  bool accept_operator(std::string_view text) { return at_operator(text) && ++at_; }
  void expect_operator(std::string_view text);
  void expect_name(std::string_view name);
  void expect(TokenKind kind, std::string_view what);
  std::string expect_identifier();
  [[noreturn]] void fail_here(std::string_view message) const;
  [[noreturn]] void fail_expected(std::string_view what) const;

  ExpressionPtr make(ExprKind kind, std::string name = "") const;
  void add_child(Expression& node, ExpressionPtr child) const;
  template <class... Children>
  ExpressionPtr make_of(ExprKind kind, std::string name, Children... children) const {
    ExpressionPtr node = make(kind, std::move(name));
    (add_child(*node, std::move(children)), ...);
    return node;
  }

  ExpressionPtr parse_expression();
  // "a, b" as a tuple; a single expression as itself.
  ExpressionPtr parse_expression_list();
  // Without an "if" at its end, which a loop takes for its own.
  ExpressionPtr parse_operation();
  ExpressionPtr parse_filters(ExpressionPtr node);
  // After "|"; a null input is the body of a block.
  ExpressionPtr parse_filter(ExpressionPtr input);

 private:
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  [[noreturn]] void fail_too_deep() const;
  bool at_end_of_list() const;
  bool at_argument_of_test() const;
  // The level of the binary operator that comes next, or 0.
  int next_level() const;
  ExpressionPtr parse_binary(int lowest);
  ExpressionPtr parse_comparison(ExpressionPtr first);
  ExpressionPtr parse_unary(bool with_filters);
  ExpressionPtr parse_primary();
  ExpressionPtr constant(Value value) const;
  ExpressionPtr parse_name();
  ExpressionPtr parse_postfix(ExpressionPtr node);
  ExpressionPtr parse_subscript(ExpressionPtr object);
  // "(a, b, name=c)"
  void parse_arguments(Expression& node);
  std::string parse_dotted_name();
  ExpressionPtr parse_test(ExpressionPtr input);

  std::string where_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace octet::text::jinja
