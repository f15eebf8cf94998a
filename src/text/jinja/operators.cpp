// Python's operators on values.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "text/jinja/value.h"

namespace octet::text::jinja {
namespace {

[[noreturn]] void fail_operator(std::string_view operation, const Value& a, const Value& b) {
  for (const Value* side : {&a, &b}) {
    if (const auto* missing = side->get<Undefined>()) {
      value_error("\"{}\" is undefined", missing->name);
    }
  }
  value_error("\"{}\" does not work between {} and {}", operation, a.type_name(), b.type_name());
}

int64_t checked(bool overflow, int64_t result) {
  if (overflow) value_error("integers must fit 64 bits, but a result does not");
  return result;
}

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) value_error("division by zero");
  if (b == -1) {
    int64_t result = 0;
    const bool overflow = __builtin_sub_overflow(int64_t{0}, a, &result);
    return checked(overflow, result);
  }
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
}

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (; exponent > 0; --exponent) {
    const bool overflow = __builtin_mul_overflow(result, base, &result);
    checked(overflow, result);
  }
  return result;
}

Value integer_arithmetic(std::string_view operation, int64_t a, int64_t b) {
  int64_t result = 0;
  if (operation == "-") {
    const bool overflow = __builtin_sub_overflow(a, b, &result);
    return checked(overflow, result);
  }
  if (operation == "*") {
    const bool overflow = __builtin_mul_overflow(a, b, &result);
    return checked(overflow, result);
  }
  if (operation == "//") return floor_divide(a, b);
  if (operation == "%") return b == -1 ? int64_t{0} : a - b * floor_divide(a, b);
  return b >= 0 ? Value(power(a, b))
                : Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
}

Value float_arithmetic(std::string_view operation, double a, double b) {
  if (operation == "-") return a - b;
  if (operation == "*") return a * b;
  if (operation == "**") return std::pow(a, b);
  if (b == 0) value_error("division by zero");
  if (operation == "/") return a / b;
  if (operation == "//") return std::floor(a / b);
  const double remainder = std::fmod(a, b);
  return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

Value repeat(const Value& sequence, int64_t count) {
  count = std::max<int64_t>(count, 0);
  const size_t size =
      sequence.string() ? sequence.string()->size() : sequence.items()->size() * sizeof(Value);
  if (size > 0 && static_cast<uint64_t>(count) > kMaxBytes / size) {
    value_error("a value repeated {} times grows beyond {} bytes", count, kMaxBytes);
  }
  if (size == 0) count = 0;
  if (const std::string* text = sequence.string()) {
    std::string result;
    for (int64_t i = 0; i < count; ++i) result += *text;
    return result;
  }
  std::vector<Value> result;
  for (int64_t i = 0; i < count; ++i) {
    result.insert(result.end(), sequence.items()->begin(), sequence.items()->end());
  }
  return Value::list(std::move(result));
}

}  // namespace

Value add(const Value& a, const Value& b) {
  if (a.string() && b.string()) {
    if (a.string()->size() + b.string()->size() > kMaxBytes) {
      value_error("a text grew beyond {} bytes", kMaxBytes);
    }
    return *a.string() + *b.string();
  }
  if (a.items() && b.items()) {
    if ((a.items()->size() + b.items()->size()) * sizeof(Value) > kMaxBytes) {
      value_error("a list grew beyond {} bytes", kMaxBytes);
    }
    std::vector<Value> items = *a.items();
    items.insert(items.end(), b.items()->begin(), b.items()->end());
    return Value::list(std::move(items), (*a.get<std::shared_ptr<const List>>())->is_tuple);
  }
  if (!a.is_number() || !b.is_number()) fail_operator("+", a, b);
  if (a.get<double>() || b.get<double>()) return a.number() + b.number();
  int64_t result = 0;
  const bool overflow = __builtin_add_overflow(a.integer("+"), b.integer("+"), &result);
  return checked(overflow, result);
}

Value arithmetic(std::string_view operation, const Value& a, const Value& b) {
  if (operation == "+") return add(a, b);
  if (operation == "*") {
    const bool a_repeats = (a.string() || a.items()) && b.is_number() && !b.get<double>();
    const bool b_repeats = (b.string() || b.items()) && a.is_number() && !a.get<double>();
    if (a_repeats) return repeat(a, b.integer("*"));
    if (b_repeats) return repeat(b, a.integer("*"));
  }
  if (!a.is_number() || !b.is_number()) fail_operator(operation, a, b);
  if (operation != "/" && !a.get<double>() && !b.get<double>()) {
    return integer_arithmetic(operation, a.integer(operation), b.integer(operation));
  }
  return float_arithmetic(operation, a.number(), b.number());
}

Value negate(const Value& value) {
  if (const auto* number = value.get<double>()) return -*number;
  return integer_arithmetic("-", 0, value.integer("what is negated"));
}

Value get_item(const Value& container, const Value& key) {
  if (const Dict* dict = container.dict()) {
    if (const Value* found = key.string() ? dict->find(*key.string()) : nullptr) return *found;
  } else if ((container.items() || container.string()) && key.is_number() && !key.get<double>()) {
    int64_t index = key.integer("an index");
    const int64_t count = container.length();
    if (index < 0) index += count;
    if (index >= 0 && index < count) {
      return container.items() ? (*container.items())[index]
                               : Value(characters_of(*container.string())[index]);
    }
  } else if (const auto* missing = container.get<Undefined>()) {
    value_error("\"{}\" is undefined", missing->name);
  }
  return Undefined{fmt::format("{}[{}]", container.type_name(), key.repr())};
}

Value slice(const Value& sequence, const Value& begin, const Value& end, const Value& step) {
  if (const auto* missing = sequence.get<Undefined>()) {
    value_error("\"{}\" is undefined", missing->name);
  }
  if (!sequence.items() && !sequence.string()) {
    value_error("only a list or string can be sliced, not a {}", sequence.type_name());
  }
  const int64_t stride = step.is_none() ? 1 : step.integer("a slice's step");
  if (stride == 0) value_error("a slice's step must not be 0");
  const std::vector<Value> items = sequence.iterate();
  const int64_t count = std::ssize(items);
  // Python clips both ends into [0, count], or [-1, count - 1] when walking backwards.
  const int64_t low = stride > 0 ? 0 : -1;
  const int64_t high = stride > 0 ? count : count - 1;
  const auto clip = [&](const Value& bound, int64_t fallback) {
    if (bound.is_none()) return fallback;
    const int64_t at = bound.integer("a slice's bound");
    return std::clamp(at < 0 ? at + count : at, low, high);
  };
  const int64_t first = clip(begin, stride > 0 ? low : high);
  const int64_t last = clip(end, stride > 0 ? high : low);
  std::vector<Value> result;
  const int64_t distance = stride > 0 ? last - first : first - last;
  // Unsigned, as the magnitude of the most negative step has no signed form.
  const uint64_t magnitude =
      stride > 0 ? static_cast<uint64_t>(stride) : 0 - static_cast<uint64_t>(stride);
  const uint64_t total = distance <= 0 ? 0 : (static_cast<uint64_t>(distance) - 1) / magnitude + 1;
  for (uint64_t i = 0; i < total; ++i) {
    const auto offset = static_cast<int64_t>(i * magnitude);
    result.push_back(items[stride > 0 ? first + offset : first - offset]);
  }
  if (sequence.string()) {
    std::string text;
    for (const Value& character : result) text += *character.string();
    return text;
  }
  return Value::list(std::move(result), (*sequence.get<std::shared_ptr<const List>>())->is_tuple);
}

}  // namespace octet::text::jinja
