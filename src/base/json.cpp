#include "base/json.h"

#include <cmath>
#include <set>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"

namespace octet {

namespace {

constexpr int kMaxDepth = 500;  // writing and copying recurse

template <class AnyJson>
AnyJson parse(std::string_view text, std::string_view where) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto on_event = [&](int depth, typename AnyJson::parse_event_t event, AnyJson& parsed) {
    if (depth > kMaxDepth)
      fail(where, "JSON may be nested at most {} deep, but is deeper", kMaxDepth);
    if (event == AnyJson::parse_event_t::object_start) keys.emplace_back();
    if (event == AnyJson::parse_event_t::object_end) keys.pop_back();
    if (event == AnyJson::parse_event_t::key) {
      const std::string& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second && duplicate.empty()) duplicate = key;
    }
    return true;
  };
  try {
    AnyJson result = AnyJson::parse(text, on_event);
    if (!duplicate.empty()) {
      fail(where, "a key must stand once in a JSON object, but \"{}\" stands twice", duplicate);
    }
    return result;
  } catch (const nlohmann::json::exception& error) {
    std::string reason = error.what();  // "[json.exception...] parse error at line L, column C: …"
    if (const size_t end = reason.find("] "); end != std::string::npos) reason.erase(0, end + 2);
    fail(where, "valid JSON is required, but: {}", reason);
  }
}

}  // namespace

Json parse_json(std::string_view text, std::string_view where) { return parse<Json>(text, where); }

SortedJson parse_sorted_json(std::string_view text, std::string_view where) {
  return parse<SortedJson>(text, where);
}

Json read_json_file(const std::string& path) { return parse_json(read_file(path), path); }

std::string json_number(float value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

}  // namespace octet
