// The methods of strings, lists, dicts and loops, and attributes.
#include <algorithm>
#include <map>

#include "text/jinja/builtins.h"
#include "text/utf8.h"

namespace octet::text::jinja {
namespace {

using Method = Value (*)(const Value& object, const Arguments& arguments);
using Table = std::map<std::string_view, Method>;

const std::string& text_of(const Value& object) { return object.text("the object of a method"); }

template <bool kLeft, bool kRight>
Value strip_method(const Value& object, const Arguments& arguments) {
  arguments.check("strip", {"chars"});
  return strip(text_of(object), arguments.get(0, "chars", None{}), kLeft, kRight);
}

// Whether the text begins or ends with one of the given texts.
template <bool kStart>
Value affix_method(const Value& object, const Arguments& arguments) {
  arguments.check("startswith and endswith", {"affix"});
  const std::string& text = text_of(object);
  const Value affix = arguments.get(0, "affix", Undefined{"affix"});
  const auto matches = [&](const Value& one) {
    const std::string& part = one.text("what startswith and endswith look for");
    return kStart ? text.starts_with(part) : text.ends_with(part);
  };
  if (!affix.items()) return matches(affix);
  return std::any_of(affix.items()->begin(), affix.items()->end(), matches);
}

// Python's split() without a separator: at runs of white space, with nothing empty.
std::vector<Value> split_at_spaces(std::string_view text, int64_t limit, bool from_right) {
  std::vector<Value> parts;
  while (true) {
    text = strip(text, None{}, !from_right, from_right);
    if (text.empty()) return parts;
    if (parts.size() >= kMaxItems) value_error("split gave more than {} parts", kMaxItems);
    if (std::ssize(parts) == limit) {
      parts.emplace_back(text);
      return parts;
    }
    size_t at = from_right ? text.size() : 0;  // walks over one word
    if (from_right) {
      while (at > 0 && !is_space(code_point_before(text, at).value)) {
        at -= code_point_before(text, at).length;
      }
    } else {
      while (at < text.size() && !is_space(code_point_at(text, at).value)) {
        at += code_point_at(text, at).length;
      }
    }
    parts.emplace_back(from_right ? text.substr(at) : text.substr(0, at));
    text = from_right ? text.substr(0, at) : text.substr(at);
  }
}

template <bool kFromRight>
Value split_method(const Value& object, const Arguments& arguments) {
  arguments.check("split", {"sep", "maxsplit"});
  std::string_view text = text_of(object);
  const Value separator = arguments.get(0, "sep", None{});
  const int64_t limit = arguments.get(1, "maxsplit", int64_t{-1}).integer("maxsplit");
  std::vector<Value> parts;
  if (separator.is_none()) {
    parts = split_at_spaces(text, limit, kFromRight);
  } else {
    const std::string& between = separator.text("split's separator");
    if (between.empty()) value_error("split's separator must not be empty");
    while (std::ssize(parts) != limit) {
      const size_t at = kFromRight ? text.rfind(between) : text.find(between);
      if (at == std::string_view::npos) break;
      if (parts.size() >= kMaxItems) value_error("split gave more than {} parts", kMaxItems);
      const size_t after = at + between.size();
      parts.emplace_back(kFromRight ? text.substr(after) : text.substr(0, at));
      text = kFromRight ? text.substr(0, at) : text.substr(after);
    }
    parts.emplace_back(text);
  }
  if (kFromRight) std::reverse(parts.begin(), parts.end());
  return Value::list(std::move(parts));
}

template <bool kFromRight>
Value partition_method(const Value& object, const Arguments& arguments) {
  arguments.check("partition", {"sep"});
  const std::string_view text = text_of(object);
  const Value separator = arguments.get(0, "sep", Undefined{"sep"});
  const std::string& between = separator.text("partition's separator");
  if (between.empty()) value_error("partition's separator must not be empty");
  const size_t at = kFromRight ? text.rfind(between) : text.find(between);
  if (at == std::string_view::npos) {
    return kFromRight ? Value::list({"", "", text}, true) : Value::list({text, "", ""}, true);
  }
  return Value::list({text.substr(0, at), between, text.substr(at + between.size())}, true);
}

Value splitlines(const Value& object, const Arguments& arguments) {
  arguments.check("splitlines", {"keepends"});
  const bool keep = arguments.get(0, "keepends", false).truthy();
  const std::string_view text = text_of(object);
  std::vector<Value> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of("\n\r\v\f", begin), text.size());
    size_t next = std::min(end + 1, text.size());
    if (end + 1 < text.size() && text[end] == '\r' && text[end + 1] == '\n') ++next;
    if (lines.size() >= kMaxItems) value_error("splitlines gave more than {} lines", kMaxItems);
    lines.emplace_back(text.substr(begin, (keep ? next : end) - begin));
    begin = next;
  }
  return Value::list(std::move(lines));
}

template <bool kFromRight>
Value find_method(const Value& object, const Arguments& arguments) {
  arguments.check("find", {"sub"});
  const std::string& text = text_of(object);
  const Value part = arguments.get(0, "sub", Undefined{"sub"});
  const std::string& wanted = part.text("what find looks for");
  const size_t at = kFromRight ? text.rfind(wanted) : text.find(wanted);
  // Python counts characters.
  return at == std::string::npos ? int64_t{-1} : Value(text.substr(0, at)).length();
}

Value replace_method(const Value& object, const Arguments& arguments) {
  arguments.check("replace", {"old", "new", "count"});
  const Value from = arguments.get(0, "old", Undefined{"old"});
  const Value to = arguments.get(1, "new", Undefined{"new"});
  return replace(text_of(object), from.text("what is replaced"), to.text("the replacement"),
                 arguments.get(2, "count", int64_t{-1}).integer("count"));
}

Value count_in_text(const Value& object, const Arguments& arguments) {
  arguments.check("count", {"sub"});
  const std::string& text = text_of(object);
  const Value part = arguments.get(0, "sub", Undefined{"sub"});
  const std::string& wanted = part.text("what is counted");
  if (wanted.empty()) return object.length() + 1;
  int64_t count = 0;
  for (size_t at = 0; (at = text.find(wanted, at)) != std::string::npos; at += wanted.size())
    ++count;
  return count;
}

template <bool kPrefix>
Value remove_affix(const Value& object, const Arguments& arguments) {
  arguments.check("removeprefix and removesuffix", {"affix"});
  const std::string_view text = text_of(object);
  const Value affix = arguments.get(0, "affix", Undefined{"affix"});
  const std::string& part = affix.text("what is removed");
  if (kPrefix) return text.starts_with(part) ? text.substr(part.size()) : text;
  return text.ends_with(part) ? text.substr(0, text.size() - part.size()) : text;
}

// Whether the text has characters, all of which satisfy the test.
template <bool (*kTest)(char32_t)>
Value all_characters(const Value& object, const Arguments& arguments) {
  arguments.check("a test of characters", {});
  const std::string& text = text_of(object);
  for (size_t i = 0; i < text.size(); i += code_point_at(text, i).length) {
    if (!kTest(code_point_at(text, i).value)) return false;
  }
  return !text.empty();
}
bool is_ascii_digit(char32_t c) { return c >= '0' && c <= '9'; }
bool is_letter(char32_t c) { return is_word_character(c) && c != '_' && !is_ascii_digit(c); }
bool is_letter_or_digit(char32_t c) { return is_word_character(c) && c != '_'; }

template <std::string (*kMap)(std::string_view)>
Value map_text(const Value& object, const Arguments& arguments) {
  arguments.check("a method that maps a text", {});
  return kMap(text_of(object));
}
template <std::string (*kMap)(std::string_view), std::string (*kOther)(std::string_view)>
Value is_mapped(const Value& object, const Arguments& arguments) {
  arguments.check("a test of letters", {});
  const std::string& text = text_of(object);
  return kMap(text) == text && kOther(text) != text;
}

const Table& string_methods() {
  static const Table table = {
      {"capitalize", map_text<capitalize>},
      {"count", count_in_text},
      {"endswith", affix_method<false>},
      {"find", find_method<false>},
      {"isalnum", all_characters<is_letter_or_digit>},
      {"isalpha", all_characters<is_letter>},
      {"isdigit", all_characters<is_ascii_digit>},
      {"islower", is_mapped<lower, upper>},
      {"isspace", all_characters<is_space>},
      {"isupper", is_mapped<upper, lower>},
      {"join",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("join", {"iterable"});
         const auto items = arguments.get(0, "iterable", Undefined{"iterable"}).iterate();
         for (const Value& item : items) item.text("an item that is joined");
         return join(items, text_of(object));
       }},
      {"lower", map_text<lower>},
      {"lstrip", strip_method<true, false>},
      {"partition", partition_method<false>},
      {"removeprefix", remove_affix<true>},
      {"removesuffix", remove_affix<false>},
      {"replace", replace_method},
      {"rfind", find_method<true>},
      {"rpartition", partition_method<true>},
      {"rsplit", split_method<true>},
      {"rstrip", strip_method<false, true>},
      {"split", split_method<false>},
      {"splitlines", splitlines},
      {"startswith", affix_method<true>},
      {"strip", strip_method<true, true>},
      {"title", map_text<title>},
      {"upper", map_text<upper>},
  };
  return table;
}

const Table& dict_methods() {
  static const Table table = {
      {"copy", [](const Value& object, const Arguments&) -> Value { return object; }},
      {"get",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("get", {"key", "default"});
         const Value key = arguments.get(0, "key", Undefined{"key"});
         const Value* found = key.string() ? object.dict()->find(*key.string()) : nullptr;
         return found != nullptr ? *found : arguments.get(1, "default", None{});
       }},
      {"items",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("items", {});
         std::vector<Value> items;
         for (const auto& [key, value] : object.dict()->items) {
           items.push_back(Value::list({key, value}, true));
         }
         return Value::list(std::move(items));
       }},
      {"keys",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("keys", {});
         return Value::list(object.iterate());
       }},
      {"values",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("values", {});
         std::vector<Value> values;
         for (const auto& item : object.dict()->items) values.push_back(item.second);
         return Value::list(std::move(values));
       }},
  };
  return table;
}

const Table& list_methods() {
  static const Table table = {
      {"count",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("count", {"value"});
         const Value wanted = arguments.get(0, "value", Undefined{"value"});
         return int64_t{std::count_if(object.items()->begin(), object.items()->end(),
                                      [&](const Value& item) { return equal(item, wanted); })};
       }},
      {"index",
       [](const Value& object, const Arguments& arguments) -> Value {
         arguments.check("index", {"value"});
         const Value wanted = arguments.get(0, "value", Undefined{"value"});
         for (size_t i = 0; i < object.items()->size(); ++i) {
           if (equal((*object.items())[i], wanted)) return static_cast<int64_t>(i);
         }
         value_error("{} is not in the list", wanted.repr());
       }},
  };
  return table;
}

const Table& loop_methods() {
  static const Table table = {
      {"changed",
       [](const Value& object, const Arguments& arguments) -> Value {
         Loop& loop = *object.loop();
         Value now = Value::list(arguments.positional);
         const bool changed = !loop.has_changed_value || !equal(loop.changed_value, now);
         loop.changed_value = std::move(now);
         loop.has_changed_value = true;
         return changed;
       }},
      {"cycle",
       [](const Value& object, const Arguments& arguments) -> Value {
         if (arguments.positional.empty()) value_error("cycle needs values");
         return arguments.positional[object.loop()->index % arguments.positional.size()];
       }},
  };
  return table;
}

const Table& methods_of(const Value& object) {
  static const Table none;
  if (object.string()) return string_methods();
  if (object.dict()) return dict_methods();
  if (object.items()) return list_methods();
  return object.loop() ? loop_methods() : none;
}

}  // namespace

bool has_method(const Value& object, std::string_view name) {
  return methods_of(object).contains(name);
}

Value call_method(const Value& object, std::string_view name, const Arguments& arguments) {
  const auto method = methods_of(object).find(name);
  if (method == methods_of(object).end()) {
    value_error("a {} has no method \"{}\" that is supported", object.type_name(), name);
  }
  Value result = method->second(object, arguments);
  if (arguments.budget != nullptr) {
    arguments.budget->charge(object.shallow_cost() + result.shallow_cost());
  }
  return result;
}

Value get_attribute(const Value& object, std::string_view name) {
  const Value* found = nullptr;
  if (const auto* missing = object.get<Undefined>()) {
    value_error("\"{}\" is undefined", missing->name);
  } else if (const Dict* dict = object.dict()) {
    found = dict->find(name);
  } else if (const Namespace* space = object.name_space()) {
    found = space->find(name);
  } else if (const Loop* loop = object.loop()) {
    return loop->attribute(name);
  }
  return found != nullptr ? *found : Value(Undefined{std::string(name)});
}

const Value* Arguments::find(size_t index, std::string_view name) const {
  if (index < positional.size()) return &positional[index];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

Value Arguments::get(size_t index, std::string_view name, Value fallback) const {
  const Value* value = find(index, name);
  return value != nullptr ? *value : std::move(fallback);
}

void Arguments::check(std::string_view function,
                      std::initializer_list<std::string_view> names) const {
  if (positional.size() > names.size()) {
    value_error("{} takes at most {} arguments, but {} are given", function, names.size(),
                positional.size());
  }
  for (const auto& [key, value] : named) {
    const auto* known = std::find(names.begin(), names.end(), key);
    if (known == names.end()) value_error("{} has no argument \"{}\"", function, key);
    if (known - names.begin() < std::ssize(positional)) {
      value_error("{} is given its argument \"{}\" twice", function, key);
    }
  }
}

Arguments Arguments::without_first(size_t count) const {
  Arguments rest = *this;
  rest.positional.erase(rest.positional.begin(),
                        rest.positional.begin() + std::min(count, positional.size()));
  return rest;
}

}  // namespace octet::text::jinja
