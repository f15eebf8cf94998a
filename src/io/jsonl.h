// Datasets as files: JSON Lines, or one JSON array of objects; either may be gzip-compressed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace octet::io {

// Include <nlohmann/json.hpp> where rows are looked at.
struct Dataset {
  std::string path;
  int64_t num_bytes = 0;             // of the file as it lies on disk
  uint32_t crc32 = 0;                // of the same bytes (ISO 3309, as gzip and zip use it)
  std::vector<Json> rows;            // objects, at least one
  std::vector<std::string> columns;  // every key of any row, in order of first appearance

  bool has_column(const std::string& name) const;
};

// Errors name the file, the line (or the row of an array) and the reason: text that is no JSON, a
// row that is no object, an empty dataset. Blank lines are allowed only at the end. The content
// decides, not the name: gzip by its first two bytes, an array by its opening bracket.
Dataset read_jsonl(const std::string& path);

}  // namespace octet::io
