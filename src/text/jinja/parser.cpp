#include "text/jinja/parser.h"

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "text/jinja/expression_parser.h"

namespace octet::text::jinja {
namespace {

class Parser : private ExpressionParser {
 public:
  Parser(std::string_view source, std::string_view where) : ExpressionParser(source, where) {}

  Body run() { return parse_body({}); }

 private:
  using StmtKind = Statement::Kind;

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
          advance();
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
    advance();
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
      advance();
      expect_block_end();
      scope.body = parse_body_until("endgeneration");
      return scope;
    }
    if (at_name("break") || at_name("continue")) {
      if (loops_ == 0) fail_here(fmt::format("\"{}\" stands in no loop", current().text));
      Statement jump = statement(at_name("break") ? StmtKind::kBreak : StmtKind::kContinue);
      advance();
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
    advance();
    result.target = parse_target(false);
    expect_name("in");
    result.expression = parse_operation();
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
    advance();
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
    advance();
    result.text = expect_identifier();
    parse_parameters(result);
    expect_block_end();
    result.body = parse_closed_body("endmacro");
    return result;
  }

  Statement parse_call_block() {
    Statement result = statement(StmtKind::kCallBlock);
    advance();
    if (at_operator("(")) parse_parameters(result);
    result.expression = parse_expression();
    if (result.expression->kind != ExprKind::kCall) fail_here("\"call\" needs a macro's call");
    expect_block_end();
    result.body = parse_closed_body("endcall");
    return result;
  }

  Statement parse_filter_block() {
    Statement result = statement(StmtKind::kFilter);
    advance();
    result.expression = parse_filters(parse_filter(nullptr));
    expect_block_end();
    result.body = parse_closed_body("endfilter");
    return result;
  }

  Statement parse_with() {
    Statement result = statement(StmtKind::kWith);
    advance();
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

  int loops_ = 0;
};

}  // namespace

Body parse_template(std::string_view source, std::string_view where) {
  return Parser(source, where).run();
}

}  // namespace octet::text::jinja
