// The tree of a template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace octet::text::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    kConstant,   // value
    kName,       // name
    kList,       // children
    kTuple,      // children
    kDict,       // children: key, value, key, value, …
    kUnary,      // name: "-", "+", "not"; children: operand
    kBinary,     // name: an arithmetic operator; children: left, right
    kConcat,     // children, joined as text
    kAnd,        // children: left, right
    kOr,         // children: left, right
    kCompare,    // children: operands; operators between them
    kIf,         // children: value, condition[, other value]
    kAttribute,  // name; children: object
    kItem,       // children: object, key
    kSlice,      // children: object, begin, end, step (null where left out)
    kCall,       // children: callee, arguments…; named arguments
    kFilter,     // name; children: input, arguments… (input null in a filter block)
    kTest,       // name; children: input, arguments…
  };
  Kind kind;
  int depth = 1;  // of the tree below, so that no walk over it can run out of stack
  std::string name = {};
  Value value = {};
  std::vector<ExpressionPtr> children = {};
  std::vector<std::pair<std::string, ExpressionPtr>> named = {};
  std::vector<std::string> operators = {};
};

struct Statement;
using Body = std::vector<Statement>;

struct Statement {
  enum class Kind {
    kData,       // text
    kPrint,      // expression
    kIf,         // branches: condition and body, in order; a null condition is "else"
    kFor,        // targets in expression; condition; body; other (for no item)
    kSet,        // targets = expression
    kSetBlock,   // targets = what body prints, through the filters of `expression`
    kMacro,      // name, parameters, body
    kCallBlock,  // expression (a call); parameters; body: what caller() prints
    kFilter,     // expression (filters without input) on what body prints
    kWith,       // parameters with values; body
    kScope,      // body, as it is: {% generation %}
    kBreak,
    kContinue,
  };
  Kind kind;
  int line = 0;
  std::string text = {};
  ExpressionPtr expression = {};
  ExpressionPtr condition = {};
  ExpressionPtr target = {};  // a name, an attribute of a namespace or a tuple of names
  std::vector<std::pair<std::string, ExpressionPtr>> parameters = {};  // with defaults, or null
  std::vector<std::pair<ExpressionPtr, Body>> branches = {};
  Body body = {};
  Body other = {};
};

}  // namespace octet::text::jinja
