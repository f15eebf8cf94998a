#include "io/json_keys.h"

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet::io {

JsonKeys::JsonKeys(const Json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object())
    fail(where_, "a JSON object is required, but {} is given", object.dump());
}

const Json* JsonKeys::find(const std::string& key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void JsonKeys::wrong(const std::string& key, std::string_view required) const {
  const Json* value = find(key);
  fail(where_, "\"{}\" must be {}, but is {}", key, required,
       value == nullptr ? "missing" : value->dump());
}

std::optional<int64_t> JsonKeys::find_int(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer() ||
      (value->is_number_unsigned() &&
       value->get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()})) {
    wrong(key, "an integer");
  }
  return value->get<int64_t>();
}

std::optional<double> JsonKeys::find_double(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong(key, "a number");
  return value->get<double>();
}

std::optional<bool> JsonKeys::find_bool(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong(key, "true or false");
  return value->get<bool>();
}

std::optional<std::string> JsonKeys::find_string(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong(key, "a string");
  return value->get<std::string>();
}

std::vector<std::string> JsonKeys::find_strings(const std::string& key) const {
  std::vector<std::string> strings;
  const Json* value = find(key);
  if (value == nullptr) return strings;
  if (!value->is_array()) wrong(key, "a list of strings");
  for (const Json& item : *value) {
    if (!item.is_string()) wrong(key, "a list of strings");
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

std::optional<JsonKeys> JsonKeys::find_object(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) wrong(key, "an object");
  return JsonKeys(*value, where_);
}

int64_t JsonKeys::get_size(const std::string& key) const {
  constexpr int64_t kMaxSize = int64_t{1} << 40;
  const int64_t value = find_int(key).value_or(0);
  if (value < 1 || value > kMaxSize) wrong(key, "a positive integer");
  return value;
}

double JsonKeys::get_positive(const std::string& key) const {
  const double value = find_double(key).value_or(0);
  if (!(value > 0 && std::isfinite(value))) wrong(key, "a positive number");
  return value;
}

std::string JsonKeys::get_string(const std::string& key) const {
  if (!has(key)) wrong(key, "a string");
  return *find_string(key);
}

int64_t JsonKeys::size_or(const std::string& key, int64_t fallback) const {
  return has(key) ? get_size(key) : fallback;
}

double JsonKeys::positive_or(const std::string& key, double fallback) const {
  return has(key) ? get_positive(key) : fallback;
}

std::vector<int32_t> JsonKeys::find_ids(const std::string& key) const {
  std::vector<int32_t> ids;
  const Json* value = find(key);
  if (value == nullptr) return ids;
  const auto add = [&](const Json& item) {
    if (!item.is_number_integer() || item.get<int64_t>() > std::numeric_limits<int32_t>::max()) {
      wrong(key, "a token id or a list of them");
    }
    if (item.get<int64_t>() >= 0) ids.push_back(static_cast<int32_t>(item.get<int64_t>()));
  };
  if (value->is_array()) {
    for (const Json& item : *value) add(item);
  } else {
    add(*value);
  }
  return ids;
}

}  // namespace octet::io
