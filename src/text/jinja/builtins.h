// Jinja's filters, tests and methods.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace octet::text::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
  Budget* budget = nullptr;  // what the filter, test or method is charged to

  // The argument at `index` or called `name`; null where it was not given.
  const Value* find(size_t index, std::string_view name) const;
  // A given argument must be one of these, in this order; else a ValueError.
  void check(std::string_view function, std::initializer_list<std::string_view> names) const;
  Value get(size_t index, std::string_view name, Value fallback) const;
  // Those after the first `count`.
  Arguments without_first(size_t count) const;
};

bool is_filter(std::string_view name);
bool is_test(std::string_view name);

// Unknown names and wrong arguments are a ValueError.
Value apply_filter(std::string_view name, const Value& input, const Arguments& arguments);
bool apply_test(std::string_view name, const Value& input, const Arguments& arguments);

// Whether a value has the method; and its call.
bool has_method(const Value& object, std::string_view name);
Value call_method(const Value& object, std::string_view name, const Arguments& arguments);

// object.name, where `name` is no method: a member, or undefined. Of an undefined object: an error.
Value get_attribute(const Value& object, std::string_view name);

// Texts as Python's methods make them.
std::string lower(std::string_view text);
std::string upper(std::string_view text);
// A part of `text`, without the characters (none: white space) at its ends.
std::string_view strip(std::string_view text, const Value& characters, bool left, bool right);
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t count);
std::string title(std::string_view text);
std::string capitalize(std::string_view text);
std::string join(const std::vector<Value>& items, std::string_view separator);

}  // namespace octet::text::jinja
