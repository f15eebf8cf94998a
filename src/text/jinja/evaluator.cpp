#include "text/jinja/evaluator.h"

#include <algorithm>
#include <ctime>
#include <optional>

#include "base/error.h"
#include "text/jinja/builtins.h"

namespace octet::text::jinja {

// Variables; a name is looked for here and then outwards.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> variables = {};

  void set(const std::string& name, Value value) {
    for (auto& [key, old] : variables) {
      if (key == name) {
        old = std::move(value);
        return;
      }
    }
    variables.emplace_back(name, std::move(value));
  }
  const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->parent) {
      for (const auto& [key, value] : scope->variables) {
        if (key == name) return &value;
      }
    }
    return nullptr;
  }
};

namespace {

enum class Flow { kOn, kBreak, kContinue };

constexpr int kMaxDepth = 1000;
constexpr int64_t kStepCost = 100;

class Evaluator {
 public:
  explicit Evaluator(std::string_view where) : where_(where) {}

  Flow run(const Body& body, Scope& scope, std::string& out) {
    for (const Statement& statement : body) {
      Flow flow = Flow::kOn;
      try {
        const Step step(*this);
        flow = run(statement, scope, out);
        if (out.size() > kMaxBytes) value_error("the output grew beyond {} bytes", kMaxBytes);
      } catch (const ValueError& error) {
        fail(where_, "line {}: {}", statement.line, error.message);
      }
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

 private:
  using ExprKind = Expression::Kind;
  using StmtKind = Statement::Kind;

  struct Step {  // counts work and depth
    explicit Step(Evaluator& evaluator) : evaluator(evaluator) {
      if (evaluator.depth_ >= kMaxDepth) value_error("calls must not be nested so deeply");
      evaluator.budget_.charge(kStepCost);
      ++evaluator.depth_;
    }
    ~Step() { --evaluator.depth_; }
    Evaluator& evaluator;
  };

  // ---- statements
  Flow run(const Statement& statement, Scope& scope, std::string& out) {
    switch (statement.kind) {
      case StmtKind::kData:
        out += statement.text;
        return Flow::kOn;
      case StmtKind::kPrint:
        out += evaluate(*statement.expression, scope).str();
        return Flow::kOn;
      case StmtKind::kIf:
        for (const auto& [condition, body] : statement.branches) {
          if (condition == nullptr || evaluate(*condition, scope).truthy()) {
            return run(body, scope, out);
          }
        }
        return Flow::kOn;
      case StmtKind::kFor:
        run_for(statement, scope, out);
        return Flow::kOn;
      case StmtKind::kSet:
        assign(*statement.target, evaluate(*statement.expression, scope), scope);
        return Flow::kOn;
      case StmtKind::kSetBlock:
        assign(*statement.target, printed(statement, scope), scope);
        return Flow::kOn;
      case StmtKind::kMacro:
        scope.set(statement.text, make_macro(statement.text, statement, scope));
        return Flow::kOn;
      case StmtKind::kCallBlock:
        out += call(*statement.expression, scope, make_macro("caller", statement, scope)).str();
        return Flow::kOn;
      case StmtKind::kFilter:
        out += printed(statement, scope).str();
        return Flow::kOn;
      case StmtKind::kWith:
        return run_with(statement, scope, out);
      case StmtKind::kScope:
        return run(statement.body, scope, out);
      case StmtKind::kBreak:
        return Flow::kBreak;
      case StmtKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kOn;
  }

  Value make_macro(std::string name, const Statement& statement, Scope& scope) const {
    return std::make_shared<const Callable>(Callable{std::move(name), &statement, &scope});
  }

  void run_for(const Statement& statement, Scope& scope, std::string& out) {
    auto loop = std::make_shared<Loop>();
    loop->items = iterate(evaluate(*statement.expression, scope));
    if (statement.condition != nullptr) {
      std::erase_if(loop->items, [&](const Value& item) {
        Scope inner{&scope};
        assign(*statement.target, item, inner);
        return !evaluate(*statement.condition, inner).truthy();
      });
    }
    if (loop->items.empty()) {
      run(statement.other, scope, out);
      return;
    }
    for (; loop->index < loop->items.size(); ++loop->index) {
      Scope inner{&scope};
      inner.set("loop", loop);
      assign(*statement.target, loop->items[loop->index], inner);
      if (run(statement.body, inner, out) == Flow::kBreak) break;
    }
  }

  Flow run_with(const Statement& statement, Scope& scope, std::string& out) {
    Scope inner{&scope};
    for (const auto& [name, value] : statement.parameters) {
      Value evaluated = evaluate(*value, scope);
      inner.set(name, std::move(evaluated));
    }
    return run(statement.body, inner, out);
  }

  // What the body prints, through the statement's filters.
  Value printed(const Statement& statement, Scope& scope) {
    Scope inner{&scope};
    std::string text;
    run(statement.body, inner, text);
    budget_.charge(std::ssize(text));
    Value value(std::move(text));
    return statement.expression == nullptr ? value : filter(*statement.expression, inner, &value);
  }

  std::vector<Value> iterate(const Value& value) {
    budget_.charge(value.string() ? 3 * value.shallow_cost() : value.shallow_cost());
    return value.iterate();
  }

  void assign(const Expression& target, const Value& value, Scope& scope) {
    switch (target.kind) {
      case ExprKind::kName:
        scope.set(target.name, value);
        return;
      case ExprKind::kAttribute: {
        const Value object = evaluate(*target.children[0], scope);
        if (object.name_space() == nullptr) {
          value_error("only a namespace's attributes can be set, not a {}'s", object.type_name());
        }
        object.name_space()->set(target.name, value);
        return;
      }
      default: {
        const std::vector<Value> parts = iterate(value);
        if (parts.size() != target.children.size()) {
          value_error("{} values are required to set as many names, but there are {}",
                      target.children.size(), parts.size());
        }
        for (size_t i = 0; i < parts.size(); ++i) assign(*target.children[i], parts[i], scope);
      }
    }
  }

  // ---- expressions
  Value evaluate(const Expression& node, Scope& scope) {
    const Step step(*this);
    switch (node.kind) {
      case ExprKind::kConstant:
        return node.value;
      case ExprKind::kName:
        return look_up(node.name, scope);
      case ExprKind::kList:
      case ExprKind::kTuple:
        return made(Value::list(evaluate_all(node, 0, scope), node.kind == ExprKind::kTuple));
      case ExprKind::kDict:
        return make_dict(node, scope);
      case ExprKind::kUnary:
        return unary(node, scope);
      case ExprKind::kBinary:
        return binary(node, scope);
      case ExprKind::kConcat:
        return concatenate(node, scope);
      case ExprKind::kAnd:
      case ExprKind::kOr: {
        Value left = evaluate(*node.children[0], scope);
        const bool decided = left.truthy() == (node.kind == ExprKind::kOr);
        return decided ? left : evaluate(*node.children[1], scope);
      }
      case ExprKind::kCompare:
        return compare_chain(node, scope);
      case ExprKind::kIf:
        if (evaluate(*node.children[1], scope).truthy()) return evaluate(*node.children[0], scope);
        return evaluate_or(node.children[2], Undefined{"an \"if\" without \"else\""}, scope);
      case ExprKind::kAttribute:
        return attribute(evaluate(*node.children[0], scope), node.name);
      case ExprKind::kItem:
        return item(node, scope);
      case ExprKind::kSlice:
        return slice_of(node, scope);
      case ExprKind::kCall:
        return call(node, scope, std::nullopt);
      case ExprKind::kFilter:
        return filter(node, scope, nullptr);
      case ExprKind::kTest: {
        const Value input = evaluate(*node.children[0], scope);
        return apply_test(node.name, input, arguments(node, scope));
      }
    }
    return Undefined{};
  }

  // A value that an operation made, charged for.
  Value made(Value value) {
    budget_.charge(value.shallow_cost());
    return value;
  }

  Value look_up(const std::string& name, Scope& scope) const {
    if (const Value* value = scope.find(name)) return *value;
    for (const std::string_view function :
         {"raise_exception", "strftime_now", "namespace", "range", "dict"}) {
      if (name == function) return std::make_shared<const Callable>(Callable{name});
    }
    return Undefined{name};
  }

  std::vector<Value> evaluate_all(const Expression& node, size_t from, Scope& scope) {
    std::vector<Value> values;
    for (size_t i = from; i < node.children.size(); ++i) {
      values.push_back(evaluate(*node.children[i], scope));
    }
    return values;
  }
  Value evaluate_or(const ExpressionPtr& node, Value fallback, Scope& scope) {
    return node == nullptr ? std::move(fallback) : evaluate(*node, scope);
  }

  // All but the first child: the callee, or the input of a filter or test.
  Arguments arguments(const Expression& node, Scope& scope) {
    Arguments result;
    result.budget = &budget_;
    result.positional = evaluate_all(node, 1, scope);
    for (const auto& [name, value] : node.named) {
      result.named.emplace_back(name, evaluate(*value, scope));
    }
    return result;
  }

  Value make_dict(const Expression& node, Scope& scope) {
    std::vector<std::pair<std::string, Value>> items;
    const std::vector<Value> parts = evaluate_all(node, 0, scope);
    for (size_t i = 0; i < parts.size(); i += 2) {
      const std::string& key = parts[i].text("a key");
      const auto old = std::find_if(items.begin(), items.end(),
                                    [&](const auto& entry) { return entry.first == key; });
      if (old != items.end()) {
        old->second = parts[i + 1];
      } else {
        items.emplace_back(key, parts[i + 1]);
      }
    }
    return made(Value::dict(std::move(items)));
  }

  Value unary(const Expression& node, Scope& scope) {
    const Value value = evaluate(*node.children[0], scope);
    if (node.name == "not") return !value.truthy();
    if (node.name == "-") return negate(value);
    if (!value.is_number()) value_error("\"+\" needs a number, not a {}", value.type_name());
    return value;
  }

  Value binary(const Expression& node, Scope& scope) {
    const Value left = evaluate(*node.children[0], scope);
    const Value right = evaluate(*node.children[1], scope);
    return made(arithmetic(node.name, left, right));
  }

  Value concatenate(const Expression& node, Scope& scope) {
    return made(join(evaluate_all(node, 0, scope), ""));
  }

  Value compare_chain(const Expression& node, Scope& scope) {
    Value left = evaluate(*node.children[0], scope);
    for (size_t i = 0; i < node.operators.size(); ++i) {
      Value right = evaluate(*node.children[i + 1], scope);
      if (!compare(node.operators[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }

  bool compare(std::string_view operation, const Value& left, const Value& right) {
    budget_.charge(std::min(left.deep_cost(), right.deep_cost()));
    if (operation == "==") return equal(left, right);
    if (operation == "!=") return !equal(left, right);
    if (operation == "<") return less(left, right);
    if (operation == ">") return less(right, left);
    if (operation == "<=") return !less(right, left);
    if (operation == ">=") return !less(left, right);
    budget_.charge(right.deep_cost());
    return contains(right, left) == (operation == "in");
  }

  Value attribute(const Value& object, const std::string& name) const {
    if (!has_method(object, name)) return get_attribute(object, name);
    return std::make_shared<const Callable>(Callable{name, nullptr, nullptr, true, object});
  }

  Value item(const Expression& node, Scope& scope) {
    const Value object = evaluate(*node.children[0], scope);
    const Value key = evaluate(*node.children[1], scope);
    if (object.string()) iterate(object);
    if (key.string() && (object.name_space() || object.loop())) {
      return get_attribute(object, *key.string());
    }
    Value found = get_item(object, key);
    if (found.is_undefined() && key.string() && has_method(object, *key.string())) {
      return attribute(object, *key.string());
    }
    return found;
  }

  Value slice_of(const Expression& node, Scope& scope) {
    const Value sequence = evaluate(*node.children[0], scope);
    const Value begin = evaluate_or(node.children[1], None{}, scope);
    const Value end = evaluate_or(node.children[2], None{}, scope);
    const Value step = evaluate_or(node.children[3], None{}, scope);
    budget_.charge(3 * sequence.shallow_cost());
    return slice(sequence, begin, end, step);
  }

  // `block`: what stands for the missing input of the innermost filter of a filter block.
  Value filter(const Expression& node, Scope& scope, const Value* block) {
    const Step step(*this);
    if (node.kind != ExprKind::kFilter) value_error("only filters may follow here");
    const Value input = node.children[0] == nullptr ? *block
                        : block != nullptr          ? filter(*node.children[0], scope, block)
                                                    : evaluate(*node.children[0], scope);
    return apply_filter(node.name, input, arguments(node, scope));
  }

  // ---- calls
  Value call(const Expression& node, Scope& scope, const std::optional<Value>& caller) {
    const Value callee = evaluate(*node.children[0], scope);
    const Callable* function = callee.callable();
    if (function == nullptr) {
      const Expression& name = *node.children[0];
      value_error("\"{}\" is {} and cannot be called", name.name, callee.type_name());
    }
    const Arguments given = arguments(node, scope);
    if (function->macro != nullptr) return call_macro(*function, given, caller);
    if (caller) value_error("a call block needs a macro, but \"{}\" is none", function->name);
    if (function->is_method) return call_method(function->object, function->name, given);
    return made(call_global(function->name, given));
  }

  Value call_macro(const Callable& function, const Arguments& given,
                   const std::optional<Value>& caller) {
    const Statement& macro = *function.macro;
    Scope scope{function.closure};
    if (caller) scope.set("caller", *caller);
    const auto& parameters = macro.parameters;
    if (given.positional.size() > parameters.size()) {
      value_error("\"{}\" takes at most {} arguments, but {} are given", function.name,
                  parameters.size(), given.positional.size());
    }
    for (const auto& [name, value] : given.named) {
      const auto known = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const auto& entry) { return entry.first == name; });
      if (known == parameters.end()) {
        value_error("\"{}\" has no argument \"{}\"", function.name, name);
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, fallback] = parameters[i];
      const Value* value = given.find(i, name);
      scope.set(name, value != nullptr ? *value : evaluate_or(fallback, Undefined{name}, scope));
    }
    std::string out;
    run(macro.body, scope, out);
    return made(std::move(out));
  }

  Value call_global(const std::string& name, const Arguments& given) {
    if (name == "raise_exception") {
      given.check(name, {"message"});
      value_error("{}", given.get(0, "message", "").str());
    }
    if (name == "strftime_now") {
      given.check(name, {"format"});
      return format_now(given.get(0, "format", "").text("strftime_now's format"));
    }
    if (name == "range") return range(given);
    if (!given.positional.empty()) value_error("{} takes named arguments only", name);
    if (name == "dict") return Value::dict(given.named);
    auto space = std::make_shared<Namespace>();
    for (const auto& [key, value] : given.named) space->set(key, value);
    return space;
  }

  static Value range(const Arguments& given) {
    given.check("range", {"start", "stop", "step"});
    const auto number = [&](size_t i) { return given.positional[i].integer("range's argument"); };
    const size_t count = given.positional.size();
    if (count == 0) value_error("range needs an argument");
    const int64_t begin = count == 1 ? 0 : number(0);
    const int64_t end = number(count == 1 ? 0 : 1);
    const int64_t step = count == 3 ? number(2) : 1;
    if (step == 0) value_error("range's step must not be 0");
    constexpr size_t kMaxRange = 100000;  // as Jinja's sandbox
    std::vector<Value> items;
    for (int64_t i = begin; step > 0 ? i < end : i > end;) {
      if (items.size() >= kMaxRange) value_error("a range must not be longer than {}", kMaxRange);
      items.emplace_back(i);
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    return Value::list(std::move(items));
  }

  static std::string format_now(const std::string& format) {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    char buffer[1024];
    const size_t length = std::strftime(buffer, sizeof(buffer), format.c_str(), &local);
    if (length == 0 && !format.empty()) value_error("strftime_now's format is too long");
    return std::string(buffer, length);
  }

  std::string where_;
  Budget budget_;
  int depth_ = 0;
};

}  // namespace

std::string render_template(const Body& body, std::vector<std::pair<std::string, Value>> variables,
                            std::string_view where) {
  Scope globals;
  for (auto& [name, value] : variables) globals.set(name, std::move(value));
  Scope scope{&globals};
  std::string out;
  Evaluator(where).run(body, scope, out);
  return out;
}

}  // namespace octet::text::jinja
