// JSON through nlohmann-json. Headers name only the forward declaration; include
// <nlohmann/json.hpp> in the source that looks inside.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace octet {

using Json = nlohmann::ordered_json;  // keeps the order of keys

using SortedJson = nlohmann::json;  // sorts keys; look-up in logarithmic time

// Parses text strictly. Errors name `where`, the line and the column. Duplicate keys are an error.
// Json finds a key in linear time: take SortedJson for objects of many thousand keys.
Json parse_json(std::string_view text, std::string_view where);
SortedJson parse_sorted_json(std::string_view text, std::string_view where);
Json read_json_file(const std::string& path);

// The shortest text that reads back as the same float32; infinities and NaN become "null".
std::string json_number(float value);

}  // namespace octet
