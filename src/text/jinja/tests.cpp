// Jinja's tests: "x is string".
#include <algorithm>
#include <map>

#include "text/jinja/builtins.h"

namespace octet::text::jinja {
namespace {

using Test = bool (*)(const Value& value, const Arguments& arguments);

Value other(const Arguments& arguments) {
  const Value* value = arguments.find(0, "other");
  if (value == nullptr) value_error("a test that compares needs a value to compare with");
  return *value;
}

bool is_integer(const Value& value) { return value.get<int64_t>() != nullptr; }
bool is_iterable(const Value& value) {
  return value.string() || value.items() || value.dict() || value.is_undefined();
}

// Whether both are the same object; of strings, numbers and lists: equal and of one type.
bool is_same(const Value& a, const Value& b) {
  return std::string_view(a.type_name()) == b.type_name() && equal(a, b);
}

bool is_equal(const Value& value, const Arguments& arguments) {
  return equal(value, other(arguments));
}
bool is_unequal(const Value& value, const Arguments& arguments) {
  return !equal(value, other(arguments));
}
bool is_less(const Value& value, const Arguments& arguments) {
  return less(value, other(arguments));
}
bool is_greater(const Value& value, const Arguments& arguments) {
  return less(other(arguments), value);
}
bool is_at_most(const Value& value, const Arguments& arguments) {
  return !less(other(arguments), value);
}
bool is_at_least(const Value& value, const Arguments& arguments) {
  return !less(value, other(arguments));
}

int64_t remainder(const Value& value, int64_t divisor) {
  return arithmetic("%", Value(value.integer("a tested number")), divisor).integer("a remainder");
}

const std::map<std::string_view, Test>& tests() {
  using A = const Arguments&;
  using V = const Value&;
  static const std::map<std::string_view, Test> table = {
      {"!=", is_unequal},
      {"<", is_less},
      {"<=", is_at_most},
      {"==", is_equal},
      {">", is_greater},
      {">=", is_at_least},
      {"boolean", [](V v, A) { return v.get<bool>() != nullptr; }},
      {"callable", [](V v, A) { return v.callable() != nullptr; }},
      {"defined", [](V v, A) { return !v.is_undefined(); }},
      {"divisibleby", [](V v, A a) { return remainder(v, other(a).integer("a divisor")) == 0; }},
      {"eq", is_equal},
      {"equalto", is_equal},
      {"even", [](V v, A) { return remainder(v, 2) == 0; }},
      {"false", [](V v, A) { return v.get<bool>() && !*v.get<bool>(); }},
      {"float", [](V v, A) { return v.get<double>() != nullptr; }},
      {"ge", is_at_least},
      {"greaterthan", is_greater},
      {"gt", is_greater},
      {"in", [](V v, A a) { return contains(other(a), v); }},
      {"integer", [](V v, A) { return is_integer(v); }},
      {"iterable", [](V v, A) { return is_iterable(v); }},
      {"le", is_at_most},
      {"lessthan", is_less},
      {"lower", [](V v, A) { return v.str() == lower(v.str()) && v.str() != upper(v.str()); }},
      {"lt", is_less},
      {"mapping", [](V v, A) { return v.dict() != nullptr; }},
      {"ne", is_unequal},
      {"none", [](V v, A) { return v.is_none(); }},
      {"number", [](V v, A) { return v.is_number(); }},
      {"odd", [](V v, A) { return remainder(v, 2) == 1; }},
      {"sameas", [](V v, A a) { return is_same(v, other(a)); }},
      {"sequence", [](V v, A) { return is_iterable(v); }},
      {"string", [](V v, A) { return v.string() != nullptr; }},
      {"true", [](V v, A) { return v.get<bool>() && *v.get<bool>(); }},
      {"undefined", [](V v, A) { return v.is_undefined(); }},
      {"upper", [](V v, A) { return v.str() == upper(v.str()) && v.str() != lower(v.str()); }},
  };
  return table;
}

}  // namespace

bool is_test(std::string_view name) { return tests().contains(name); }

bool apply_test(std::string_view name, const Value& input, const Arguments& arguments) {
  const auto test = tests().find(name);
  if (test == tests().end()) value_error("there is no test \"{}\"", name);
  arguments.check(name, {"other"});
  if (arguments.budget != nullptr) {
    const Value* other = arguments.find(0, "other");
    arguments.budget->charge(other == nullptr ? (input.string() ? input.shallow_cost() : 0)
                                              : input.deep_cost() + other->deep_cost());
  }
  return test->second(input, arguments);
}

}  // namespace octet::text::jinja
