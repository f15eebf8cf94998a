// Jinja's filters: "x | trim".
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "text/jinja/builtins.h"

namespace octet::text::jinja {
namespace {

using Filter = Value (*)(const Value& input, const Arguments& arguments);

// "a.b.0" of an item, as map(attribute=…) and its kin take it; what is undefined on the way is
// `fallback` where there is one.
Value attribute_path(Value item, const Value& path, const Value* fallback = nullptr) {
  if (path.get<int64_t>()) return get_item(item, path);
  std::string_view rest = path.text("an attribute");
  while (true) {
    const std::string_view name = rest.substr(0, rest.find('.'));
    int64_t index = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), index);
    const bool is_index = parsed.ec == std::errc() && parsed.ptr == name.data() + name.size();
    item = is_index ? get_item(item, index) : get_attribute(item, name);
    if (item.is_undefined() && fallback != nullptr) item = *fallback;
    if (name.size() == rest.size()) return item;
    rest.remove_prefix(name.size() + 1);
  }
}

// A sort key: strings without regard to case unless asked for, as Jinja's.
Value sort_key(const Value& item, const Value& attribute, bool case_sensitive) {
  Value key = attribute.is_none() ? item : attribute_path(item, attribute);
  return key.string() && !case_sensitive ? Value(lower(*key.string())) : key;
}

Value list_of(std::vector<Value> items) { return Value::list(std::move(items)); }

Value length(const Value& input, const Arguments& arguments) {
  arguments.check("length", {});
  return input.length();
}

Value fallback(const Value& input, const Arguments& arguments) {
  arguments.check("default", {"default_value", "boolean"});
  const bool replaced =
      input.is_undefined() || (arguments.get(1, "boolean", false).truthy() && !input.truthy());
  return replaced ? arguments.get(0, "default_value", "") : input;
}

template <bool kWanted>
Value select(const Value& input, const Arguments& arguments) {
  const Value name = arguments.get(0, "test", "");
  std::vector<Value> chosen;
  for (const Value& item : input.iterate()) {
    const bool passes = arguments.positional.empty() ? item.truthy()
                                                     : apply_test(name.text("a test's name"), item,
                                                                  arguments.without_first(1));
    if (passes == kWanted) chosen.push_back(item);
  }
  return list_of(std::move(chosen));
}

template <bool kWanted>
Value select_attribute(const Value& input, const Arguments& arguments) {
  if (arguments.positional.empty()) value_error("selectattr and rejectattr need an attribute");
  std::vector<Value> chosen;
  for (const Value& item : input.iterate()) {
    const Value value = attribute_path(item, arguments.positional[0]);
    const bool passes = arguments.positional.size() == 1
                            ? value.truthy()
                            : apply_test(arguments.positional[1].text("a test's name"), value,
                                         arguments.without_first(2));
    if (passes == kWanted) chosen.push_back(item);
  }
  return list_of(std::move(chosen));
}

Value map(const Value& input, const Arguments& arguments) {
  std::vector<Value> result;
  const Value* attribute = arguments.positional.empty() ? arguments.find(0, "attribute") : nullptr;
  if (attribute == nullptr && arguments.positional.empty()) {
    value_error("map needs a filter or an attribute");
  }
  for (const Value& item : input.iterate()) {
    if (attribute == nullptr) {
      result.push_back(apply_filter(arguments.positional[0].text("a filter's name"), item,
                                    arguments.without_first(1)));
      continue;
    }
    result.push_back(attribute_path(item, *attribute, arguments.find(1, "default")));
  }
  return list_of(std::move(result));
}

Value join_filter(const Value& input, const Arguments& arguments) {
  arguments.check("join", {"d", "attribute"});
  std::vector<Value> items = input.iterate();
  const Value attribute = arguments.get(1, "attribute", None{});
  if (!attribute.is_none()) {
    for (Value& item : items) item = attribute_path(item, attribute);
  }
  return join(items, arguments.get(0, "d", "").str());
}

Value sort(const Value& input, const Arguments& arguments) {
  arguments.check("sort", {"reverse", "case_sensitive", "attribute"});
  const bool descending = arguments.get(0, "reverse", false).truthy();
  const bool case_sensitive = arguments.get(1, "case_sensitive", false).truthy();
  const Value attribute = arguments.get(2, "attribute", None{});
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : input.iterate()) {
    keyed.emplace_back(sort_key(item, attribute, case_sensitive), item);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return descending ? less(b.first, a.first) : less(a.first, b.first);
  });
  std::vector<Value> sorted;
  for (auto& item : keyed) sorted.push_back(std::move(item.second));
  return list_of(std::move(sorted));
}

Value dict_sort(const Value& input, const Arguments& arguments) {
  arguments.check("dictsort", {"case_sensitive", "by", "reverse"});
  const std::string by = arguments.get(1, "by", "key").str();
  if (by != "key" && by != "value") value_error("dictsort sorts by \"key\" or \"value\"");
  Arguments sorting;
  sorting.positional = {arguments.get(2, "reverse", false),
                        arguments.get(0, "case_sensitive", false), int64_t{by == "value"}};
  return sort(call_method(input, "items", {}), sorting);
}

Value unique(const Value& input, const Arguments& arguments) {
  arguments.check("unique", {"case_sensitive", "attribute"});
  const bool case_sensitive = arguments.get(0, "case_sensitive", false).truthy();
  const Value attribute = arguments.get(1, "attribute", None{});
  std::vector<Value> keys, chosen;
  for (const Value& item : input.iterate()) {
    Value key = sort_key(item, attribute, case_sensitive);
    const bool seen = std::any_of(keys.begin(), keys.end(),
                                  [&](const Value& other) { return equal(key, other); });
    if (seen) continue;
    if (keys.size() >= 1000) value_error("unique takes at most 1000 different items");
    keys.push_back(std::move(key));
    chosen.push_back(item);
  }
  return list_of(std::move(chosen));
}

template <bool kLargest>
Value extreme(const Value& input, const Arguments& arguments) {
  arguments.check("min and max", {"case_sensitive", "attribute"});
  const bool case_sensitive = arguments.get(0, "case_sensitive", false).truthy();
  const Value attribute = arguments.get(1, "attribute", None{});
  const std::vector<Value> items = input.iterate();
  if (items.empty()) return Undefined{"the extreme of no items"};
  const auto before = [&](const Value& a, const Value& b) {
    const Value x = sort_key(a, attribute, case_sensitive);
    const Value y = sort_key(b, attribute, case_sensitive);
    return kLargest ? less(y, x) : less(x, y);
  };
  return *std::min_element(items.begin(), items.end(), before);
}

Value sum(const Value& input, const Arguments& arguments) {
  arguments.check("sum", {"attribute", "start"});
  const Value attribute = arguments.get(0, "attribute", None{});
  Value total = arguments.get(1, "start", int64_t{0});
  for (const Value& item : input.iterate()) {
    const Value value = attribute.is_none() ? item : attribute_path(item, attribute);
    if (!value.is_number()) value_error("sum adds numbers, not a {}", value.type_name());
    total = add(total, value);
  }
  return total;
}

Value reverse(const Value& input, const Arguments& arguments) {
  arguments.check("reverse", {});
  std::vector<Value> items = input.iterate();
  std::reverse(items.begin(), items.end());
  if (input.string()) return join(items, "");
  return list_of(std::move(items));
}

Value first(const Value& input, const Arguments& arguments) {
  arguments.check("first", {});
  const std::vector<Value> items = input.iterate();
  return items.empty() ? Value(Undefined{"the first of no items"}) : items.front();
}

Value last(const Value& input, const Arguments& arguments) {
  arguments.check("last", {});
  const std::vector<Value> items = input.iterate();
  return items.empty() ? Value(Undefined{"the last of no items"}) : items.back();
}

Value to_integer(const Value& input, const Arguments& arguments) {
  arguments.check("int", {"default"});
  const Value other = arguments.get(0, "default", int64_t{0});
  if (const auto* number = input.get<double>()) {
    // 2^63 is the first double that no longer fits.
    return std::fabs(*number) < 9223372036854775808.0 ? Value(static_cast<int64_t>(*number))
                                                      : other;
  }
  if (input.is_number()) return input.integer("int");
  if (!input.string()) return other;
  std::string text(strip(*input.string(), None{}, true, true));
  if (text.starts_with('+')) text.erase(0, 1);
  const char* end = text.data() + text.size();
  int64_t whole = 0;
  const auto parsed = std::from_chars(text.data(), end, whole);
  if (parsed.ec == std::errc() && parsed.ptr == end) return whole;
  double number = 0;
  const auto as_float = std::from_chars(text.data(), end, number);
  if (as_float.ec != std::errc() || as_float.ptr != end || !std::isfinite(number)) return other;
  return to_integer(number, arguments);
}

Value to_float(const Value& input, const Arguments& arguments) {
  arguments.check("float", {"default"});
  if (input.is_number()) return input.number();
  std::string text(input.string() ? strip(*input.string(), None{}, true, true) : "");
  if (text.starts_with('+')) text.erase(0, 1);
  double number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  const bool valid = parsed.ec == std::errc() && parsed.ptr == end;
  return valid ? Value(number) : arguments.get(0, "default", 0.0);
}

Value round_filter(const Value& input, const Arguments& arguments) {
  arguments.check("round", {"precision", "method"});
  const int64_t precision = arguments.get(0, "precision", int64_t{0}).integer("precision");
  const std::string method = arguments.get(1, "method", "common").str();
  if (precision < 0 || precision > 15) value_error("round's precision must be from 0 to 15");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double value = input.number();
  if (method == "ceil") return std::ceil(value * scale) / scale;
  if (method == "floor") return std::floor(value * scale) / scale;
  if (method != "common") value_error("round's method must be common, ceil or floor");
  // Python rounds the decimal text, half to even: so does printing.
  double rounded = 0;
  const std::string text = fmt::format("{:.{}f}", value, static_cast<int>(precision));
  std::from_chars(text.data(), text.data() + text.size(), rounded);
  return rounded;
}

Value indent(const Value& input, const Arguments& arguments) {
  arguments.check("indent", {"width", "first", "blank"});
  const Value width = arguments.get(0, "width", int64_t{4});
  const bool indent_first = arguments.get(1, "first", false).truthy();
  const bool indent_blank = arguments.get(2, "blank", false).truthy();
  std::string prefix;
  if (width.string()) {
    prefix = *width.string();
  } else {
    prefix.assign(static_cast<size_t>(std::clamp<int64_t>(width.integer("width"), 0, 1000)), ' ');
  }
  const std::string text = input.str();
  std::string result = indent_first ? prefix : "";
  for (size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (result.size() > kMaxBytes) value_error("a text grew beyond {} bytes", kMaxBytes);
    const bool blank_next = i + 1 >= text.size() || text[i + 1] == '\n';
    if (text[i] == '\n' && (indent_blank || !blank_next)) result += prefix;
  }
  return result;
}

Value trim(const Value& input, const Arguments& arguments) {
  arguments.check("trim", {"chars"});
  return strip(input.str(), arguments.get(0, "chars", None{}), true, true);
}

Value replace_filter(const Value& input, const Arguments& arguments) {
  arguments.check("replace", {"old", "new", "count"});
  const Value count = arguments.get(2, "count", None{});
  return replace(input.str(), arguments.get(0, "old", "").str(), arguments.get(1, "new", "").str(),
                 count.is_none() ? -1 : count.integer("count"));
}

Value to_json_filter(const Value& input, const Arguments& arguments) {
  arguments.check("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = arguments.get(0, "ensure_ascii", false).truthy();
  style.sort_keys = arguments.get(3, "sort_keys", false).truthy();
  if (const Value spaces = arguments.get(1, "indent", None{}); !spaces.is_none()) {
    style.indent = static_cast<int>(std::clamp<int64_t>(spaces.integer("indent"), 0, 64));
    style.item_separator.assign(1, ',');
  }
  if (const Value separators = arguments.get(2, "separators", None{}); !separators.is_none()) {
    if (separators.items() == nullptr || separators.items()->size() != 2) {
      value_error("tojson's separators must be a pair");
    }
    style.item_separator = (*separators.items())[0].text("a separator");
    style.key_separator = (*separators.items())[1].text("a separator");
  }
  return to_json(input, style);
}

Value escape(const Value& input, const Arguments&) {
  std::string text = replace(input.str(), "&", "&amp;", -1);
  text = replace(replace(text, "<", "&lt;", -1), ">", "&gt;", -1);
  return replace(replace(text, "'", "&#39;", -1), "\"", "&#34;", -1);
}

const std::map<std::string_view, Filter>& filters() {
  using A = const Arguments&;
  using V = const Value&;
  static const std::map<std::string_view, Filter> table = {
      {"abs", [](V v, A) { return less(v, int64_t{0}) ? negate(v) : v; }},
      {"capitalize", [](V v, A) -> Value { return capitalize(v.str()); }},
      {"count", length},
      {"d", fallback},
      {"default", fallback},
      {"dictsort", dict_sort},
      {"e", escape},
      {"escape", escape},
      {"first", first},
      {"float", to_float},
      {"indent", indent},
      {"int", to_integer},
      {"items",
       [](V v, A) { return v.is_undefined() ? list_of({}) : call_method(v, "items", {}); }},
      {"join", join_filter},
      {"last", last},
      {"length", length},
      {"list", [](V v, A) { return list_of(v.iterate()); }},
      {"lower", [](V v, A) -> Value { return lower(v.str()); }},
      {"map", map},
      {"max", extreme<true>},
      {"min", extreme<false>},
      {"reject", select<false>},
      {"rejectattr", select_attribute<false>},
      {"replace", replace_filter},
      {"reverse", reverse},
      {"round", round_filter},
      {"safe", [](V v, A) { return v; }},
      {"select", select<true>},
      {"selectattr", select_attribute<true>},
      {"sort", sort},
      {"string", [](V v, A) -> Value { return v.str(); }},
      {"sum", sum},
      {"title", [](V v, A) -> Value { return title(v.str()); }},
      {"tojson", to_json_filter},
      {"trim", trim},
      {"unique", unique},
      {"upper", [](V v, A) -> Value { return upper(v.str()); }},
  };
  return table;
}

}  // namespace

bool is_filter(std::string_view name) { return filters().contains(name); }

Value apply_filter(std::string_view name, const Value& input, const Arguments& arguments) {
  const auto filter = filters().find(name);
  if (filter == filters().end()) value_error("there is no filter \"{}\"", name);
  if (arguments.budget == nullptr) return filter->second(input, arguments);
  const bool compares = name == "sort" || name == "unique" || name == "min" || name == "max";
  const bool only_looks = name == "length" || name == "count" || name == "default" || name == "d";
  if (compares) arguments.budget->charge(input.deep_cost());
  if (!only_looks || input.string()) arguments.budget->charge(input.shallow_cost());
  Value result = filter->second(input, arguments);
  if (!only_looks) arguments.budget->charge(result.shallow_cost());
  return result;
}

}  // namespace octet::text::jinja
