#include "text/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "text/utf8.h"

namespace octet::text::jinja {
namespace {

constexpr int64_t kItemCost = 32;
// Lists can share their items, so that a few of them may stand for more than any number of bytes.
constexpr int64_t kHugeCost = int64_t{1} << 40;

bool is_plain_data(const Value& value) {
  return value.name_space() == nullptr && value.callable() == nullptr && value.loop() == nullptr;
}

const Value* find_in(const std::vector<std::pair<std::string, Value>>& items,
                     std::string_view key) {
  for (const auto& [name, value] : items) {
    if (name == key) return &value;
  }
  return nullptr;
}

}  // namespace

Value Value::list(std::vector<Value> items, bool is_tuple) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) {
    if (!is_plain_data(item)) value_error("a list cannot hold a {}", item.type_name());
    list->depth = std::max(list->depth, item.depth() + 1);
    list->deep_cost = std::min(kHugeCost, list->deep_cost + item.deep_cost());
  }
  if (list->depth > kMaxDepth) value_error("values must not be nested deeper than {}", kMaxDepth);
  list->items = std::move(items);
  list->is_tuple = is_tuple;
  return Value(Data(std::shared_ptr<const List>(std::move(list))));
}

Value Value::dict(std::vector<std::pair<std::string, Value>> items) {
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, item] : items) {
    if (!is_plain_data(item)) value_error("a dict cannot hold a {}", item.type_name());
    dict->depth = std::max(dict->depth, item.depth() + 1);
    dict->deep_cost = std::min(kHugeCost, dict->deep_cost + item.deep_cost() + kItemCost);
  }
  if (dict->depth > kMaxDepth) value_error("values must not be nested deeper than {}", kMaxDepth);
  dict->items = std::move(items);
  return Value(Data(std::shared_ptr<const Dict>(std::move(dict))));
}

Value Value::from_json(const Json& json) {
  const auto convert = [](const auto& self, const Json& node, int depth) -> Value {
    if (depth > kMaxDepth) value_error("JSON must not be nested deeper than {}", kMaxDepth);
    switch (node.type()) {
      case Json::value_t::boolean:
        return node.get<bool>();
      case Json::value_t::number_unsigned:
        if (node.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
          value_error("integers must fit 64 bits, but {} does not", node.get<uint64_t>());
        }
        [[fallthrough]];
      case Json::value_t::number_integer:
        return node.get<int64_t>();
      case Json::value_t::number_float:
        return node.get<double>();
      case Json::value_t::string:
        return node.get<std::string>();
      case Json::value_t::array: {
        std::vector<Value> items;
        for (const Json& item : node) items.push_back(self(self, item, depth + 1));
        return Value::list(std::move(items));
      }
      case Json::value_t::object: {
        std::vector<std::pair<std::string, Value>> items;
        for (const auto& [key, item] : node.items()) {
          items.emplace_back(key, self(self, item, depth + 1));
        }
        return Value::dict(std::move(items));
      }
      default:
        return None{};
    }
  };
  return convert(convert, json, 1);
}

const std::string* Value::string() const {
  const auto* string = get<String>();
  return string == nullptr ? nullptr : string->get();
}
const std::vector<Value>* Value::items() const {
  const auto* list = get<std::shared_ptr<const List>>();
  return list == nullptr ? nullptr : &(*list)->items;
}
const Dict* Value::dict() const {
  const auto* dict = get<std::shared_ptr<const Dict>>();
  return dict == nullptr ? nullptr : dict->get();
}
Namespace* Value::name_space() const {
  const auto* space = get<std::shared_ptr<Namespace>>();
  return space == nullptr ? nullptr : space->get();
}
const Callable* Value::callable() const {
  const auto* callable = get<std::shared_ptr<const Callable>>();
  return callable == nullptr ? nullptr : callable->get();
}
Loop* Value::loop() const {
  const auto* loop = get<std::shared_ptr<Loop>>();
  return loop == nullptr ? nullptr : loop->get();
}

bool Value::is_number() const { return get<bool>() || get<int64_t>() || get<double>(); }

const char* Value::type_name() const {
  constexpr const char* kNames[] = {"undefined", "none", "boolean",   "integer",  "float", "string",
                                    "list",      "dict", "namespace", "function", "loop"};
  return kNames[data_.index()];
}

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0;
  if (string() || items() || dict()) return length() != 0;
  return true;
}

int64_t Value::integer(std::string_view what) const {
  if (const auto* value = get<int64_t>()) return *value;
  if (const auto* value = get<bool>()) return *value;
  value_error("{} must be an integer, but is {} {}", what, type_name(), repr());
}

double Value::number() const {
  if (const auto* value = get<bool>()) return *value;
  if (const auto* value = get<int64_t>()) return static_cast<double>(*value);
  if (const auto* value = get<double>()) return *value;
  value_error("a number is required, but it is {} {}", type_name(), repr());
}

const std::string& Value::text(std::string_view what) const {
  if (const std::string* value = string()) return *value;
  if (const auto* missing = get<Undefined>()) {
    value_error("{} must be a string, but \"{}\" is undefined", what, missing->name);
  }
  value_error("{} must be a string, but is {} {}", what, type_name(), repr());
}

std::string Value::str() const {
  if (const std::string* value = string()) return *value;
  return is_undefined() ? "" : repr();
}

std::vector<Value> Value::iterate() const {
  if (const auto* list = items()) return *list;
  std::vector<Value> result;
  if (const Dict* dictionary = dict()) {
    for (const auto& [key, value] : dictionary->items) result.emplace_back(key);
  } else if (const std::string* value = string()) {
    for (std::string& character : characters_of(*value)) result.emplace_back(std::move(character));
  } else if (!is_undefined()) {
    value_error("what a loop or filter runs over must be a list, dict or string, but is {}",
                type_name());
  }
  return result;
}

int64_t Value::length() const {
  if (const auto* list = items()) return std::ssize(*list);
  if (const Dict* dictionary = dict()) return std::ssize(dictionary->items);
  if (const std::string* value = string()) {
    return std::count_if(value->begin(), value->end(),
                         [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
  }
  if (is_undefined()) return 0;
  value_error("{} has no length", type_name());
}

int64_t Value::shallow_cost() const {
  if (const std::string* text = string()) return kItemCost + std::ssize(*text);
  if (const auto* list = items()) return kItemCost * (1 + std::ssize(*list));
  return dict() == nullptr ? kItemCost : kItemCost * (1 + std::ssize(dict()->items));
}

int64_t Value::deep_cost() const {
  if (const auto* list = get<std::shared_ptr<const List>>()) return kItemCost + (*list)->deep_cost;
  return dict() == nullptr ? shallow_cost() : kItemCost + dict()->deep_cost;
}

int Value::depth() const {
  if (const auto* list = get<std::shared_ptr<const List>>()) return (*list)->depth;
  return dict() == nullptr ? 0 : dict()->depth;
}

const Value* Dict::find(std::string_view key) const { return find_in(items, key); }
const Value* Namespace::find(std::string_view key) const { return find_in(items, key); }

void Namespace::set(const std::string& name, Value value) {
  if (!is_plain_data(value)) value_error("a namespace cannot hold a {}", value.type_name());
  for (auto& [key, old] : items) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  items.emplace_back(name, std::move(value));
}

Value Loop::attribute(std::string_view name) const {
  const auto at = static_cast<int64_t>(index);
  const int64_t count = std::ssize(items);
  if (name == "index") return at + 1;
  if (name == "index0") return at;
  if (name == "revindex") return count - at;
  if (name == "revindex0") return count - at - 1;
  if (name == "first") return at == 0;
  if (name == "last") return at + 1 == count;
  if (name == "length") return count;
  if (name == "depth") return depth + 1;
  if (name == "depth0") return depth;
  if (name == "previtem") return at > 0 ? items[index - 1] : Undefined{"loop.previtem"};
  if (name == "nextitem") return at + 1 < count ? items[index + 1] : Undefined{"loop.nextitem"};
  return Undefined{fmt::format("loop.{}", name)};
}

bool equal(const Value& a, const Value& b) {
  if (a.get<int64_t>() && b.get<int64_t>()) return *a.get<int64_t>() == *b.get<int64_t>();
  if (a.is_number() && b.is_number()) return a.number() == b.number();
  if (a.string() && b.string()) return *a.string() == *b.string();
  if (a.items() && b.items()) {
    return std::equal(a.items()->begin(), a.items()->end(), b.items()->begin(), b.items()->end(),
                      equal);
  }
  if (a.dict() && b.dict()) {
    if (a.dict()->items.size() != b.dict()->items.size()) return false;
    return std::all_of(a.dict()->items.begin(), a.dict()->items.end(), [&](const auto& item) {
      const Value* other = b.dict()->find(item.first);
      return other != nullptr && equal(item.second, *other);
    });
  }
  if (a.is_undefined() || a.is_none()) {
    return a.is_undefined() ? b.is_undefined() : b.is_none();
  }
  return (a.name_space() && a.name_space() == b.name_space()) ||
         (a.callable() && a.callable() == b.callable()) || (a.loop() && a.loop() == b.loop());
}

bool less(const Value& a, const Value& b) {
  if (a.get<int64_t>() && b.get<int64_t>()) return *a.get<int64_t>() < *b.get<int64_t>();
  if (a.is_number() && b.is_number()) return a.number() < b.number();
  // UTF-8 sorts as its code points do.
  if (a.string() && b.string()) return *a.string() < *b.string();
  if (a.items() && b.items()) {
    const auto& x = *a.items();
    const auto& y = *b.items();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(x[i], y[i])) return less(x[i], y[i]);
    }
    return x.size() < y.size();
  }
  value_error("{} and {} cannot be put in order", a.type_name(), b.type_name());
}

bool contains(const Value& container, const Value& item) {
  if (const auto* list = container.items()) {
    return std::any_of(list->begin(), list->end(), [&](const Value& v) { return equal(v, item); });
  }
  if (const std::string* text = container.string()) {
    return text->find(item.text("what is looked for in a string")) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) {
    return item.string() != nullptr && dict->find(*item.string()) != nullptr;
  }
  if (container.is_undefined()) return false;
  value_error("\"in\" needs a list, dict or string, but has {}", container.type_name());
}

std::vector<std::string> characters_of(std::string_view text) {
  if (text.size() > kMaxItems) {
    value_error("a text of {} bytes is too long to be taken apart", text.size());
  }
  std::vector<std::string> result;
  for (size_t i = 0; i < text.size();) {
    const CodePoint next = code_point_at(text, i);
    std::string character;
    append_utf8(character, next.value);
    result.push_back(std::move(character));
    i += next.length;
  }
  return result;
}

}  // namespace octet::text::jinja
