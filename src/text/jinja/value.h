// The values of a template: Python's, as far as chat templates see them.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/core.h>

#include "base/json.h"

namespace octet::text::jinja {

// Thrown by operations on values; the evaluator adds the file and the line.
struct ValueError {
  std::string message;
};

template <class... Args>
[[noreturn]] void value_error(fmt::format_string<Args...> message, Args&&... args) {
  throw ValueError{fmt::format(message, std::forward<Args>(args)...)};
}

// What a rendering may still do, in bytes made or looked at. A template comes from outside: it must
// not be able to take the machine's time or memory.
struct Budget {
  int64_t left = int64_t{1} << 30;
  void charge(int64_t cost) {
    if ((left -= cost) < 0) value_error("the template does too much work");
  }
};

class Value;
struct List;
struct Dict;
struct Namespace;
struct Callable;
struct Loop;

struct Undefined {
  std::string name;  // what was looked for; for errors
};
struct None {};

// Cheap to copy: lists, dicts and strings are shared and never change. Only namespaces change, and
// they, callables and loops cannot be put into a list, a dict or a namespace: there are no cycles.
class Value {
 public:
  using String = std::shared_ptr<const std::string>;
  using Data =
      std::variant<Undefined, None, bool, int64_t, double, String, std::shared_ptr<const List>,
                   std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
                   std::shared_ptr<const Callable>, std::shared_ptr<Loop>>;

  Value() : data_(Undefined{}) {}
  Value(Undefined value) : data_(std::move(value)) {}
  Value(None) : data_(None{}) {}
  template <std::same_as<bool> T>  // a template, so that no pointer turns into a bool
  Value(T value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string value) : data_(std::make_shared<const std::string>(std::move(value))) {}
  Value(std::string_view value) : Value(std::string(value)) {}
  Value(const char* value) : Value(std::string(value)) {}
  Value(std::shared_ptr<Namespace> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<const Callable> value) : data_(std::move(value)) {}
  Value(std::shared_ptr<Loop> value) : data_(std::move(value)) {}
  // Nesting deeper than kMaxDepth, namespaces, callables and loops inside are a ValueError.
  static Value list(std::vector<Value> items, bool is_tuple = false);
  static Value dict(std::vector<std::pair<std::string, Value>> items);
  static Value from_json(const Json& json);

  template <class T>
  const T* get() const {
    return std::get_if<T>(&data_);
  }
  bool is_undefined() const { return get<Undefined>() != nullptr; }
  bool is_none() const { return get<None>() != nullptr; }
  const std::string* string() const;        // null where it is none
  const std::vector<Value>* items() const;  // of a list or tuple
  const Dict* dict() const;
  Namespace* name_space() const;
  const Callable* callable() const;
  Loop* loop() const;
  bool is_number() const;         // int, float or bool
  const char* type_name() const;  // "string"

  bool truthy() const;
  int64_t integer(std::string_view what) const;          // an int or bool, or a ValueError
  double number() const;                                 // of an int, float or bool
  const std::string& text(std::string_view what) const;  // a string, or a ValueError
  std::string str() const;                               // as Python's str()
  std::string repr() const;                              // as Python's repr()
  // What a loop runs over: items, keys or characters. Others are a ValueError.
  std::vector<Value> iterate() const;
  int64_t length() const;
  // About how many bytes a copy of this alone takes; and with all that it holds.
  int64_t shallow_cost() const;
  int64_t deep_cost() const;

  static constexpr int kMaxDepth = 100;

 private:
  explicit Value(Data data) : data_(std::move(data)) {}
  int depth() const;
  Data data_;
};

struct List {
  std::vector<Value> items;
  bool is_tuple = false;
  int depth = 1;
  int64_t deep_cost = 0;
};

struct Dict {
  std::vector<std::pair<std::string, Value>> items;  // in order, each key once
  int depth = 1;
  int64_t deep_cost = 0;
  const Value* find(std::string_view key) const;
};

// A macro, the caller() of a call block, a method with its object, or a global function.
struct Statement;
struct Scope;
struct Callable {
  std::string name;
  const Statement* macro = nullptr;  // its parameters and body
  Scope* closure = nullptr;          // the scope in which the macro stands; outlives the callable
  bool is_method = false;
  Value object = {};  // of a method
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
  void set(const std::string& name, Value value);
  const Value* find(std::string_view key) const;
};

struct Loop {
  std::vector<Value> items;
  size_t index = 0;
  int64_t depth = 0;
  Value changed_value;
  bool has_changed_value = false;
  Value attribute(std::string_view name) const;
};

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);  // of numbers, strings and lists; else a ValueError
bool contains(const Value& container, const Value& item);

// Python's operators. Overflow of 64 bits and wrong types are a ValueError.
Value add(const Value& a, const Value& b);
Value arithmetic(std::string_view operation, const Value& a, const Value& b);
Value negate(const Value& value);
Value get_item(const Value& container, const Value& key);
Value slice(const Value& sequence, const Value& begin, const Value& end, const Value& step);

// Python's repr() of a float: the shortest text that reads back, as "1.0", "1e-05" or "inf".
std::string float_text(double value);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  int indent = -1;  // spaces per level; -1: all on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
// Python's json.dumps.
std::string to_json(const Value& value, const JsonStyle& style);

// The code points of a text as texts of their own; what is no UTF-8 becomes U+FFFD.
// A text beyond kMaxItems bytes is a ValueError.
std::vector<std::string> characters_of(std::string_view text);

// What no template may exceed: the bytes of one text or list, and the items of a list that it
// makes.
constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr size_t kMaxItems = size_t{1} << 20;

}  // namespace octet::text::jinja
