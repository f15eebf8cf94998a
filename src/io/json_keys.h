// Typed look-up of the keys of one JSON object, with errors that name file and key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace octet::io {

// Borrows the object. A key that is missing or null counts as absent: the `get_*` without fallback
// fail, the `find_*` return nullopt. Wrong types are an Error in any case.
class JsonKeys {
 public:
  JsonKeys(const Json& object, std::string where);

  const std::string& where() const { return where_; }
  const Json* find(const std::string& key) const;
  bool has(const std::string& key) const { return find(key) != nullptr; }

  std::optional<int64_t> find_int(const std::string& key) const;
  std::optional<double> find_double(const std::string& key) const;
  std::optional<bool> find_bool(const std::string& key) const;
  std::optional<std::string> find_string(const std::string& key) const;
  std::vector<std::string> find_strings(const std::string& key) const;  // a list; empty if absent
  std::optional<JsonKeys> find_object(const std::string& key) const;

  int64_t get_size(const std::string& key) const;  // from 1 to 2^40
  double get_positive(const std::string& key) const;
  std::string get_string(const std::string& key) const;
  int64_t size_or(const std::string& key, int64_t fallback) const;
  double positive_or(const std::string& key, double fallback) const;

  // Token ids: one integer or a list; negative ones mean none.
  std::vector<int32_t> find_ids(const std::string& key) const;

  [[noreturn]] void wrong(const std::string& key, std::string_view required) const;

 private:
  const Json& object_;
  std::string where_;
};

}  // namespace octet::io
