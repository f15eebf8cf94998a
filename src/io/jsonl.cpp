#include "io/jsonl.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <zlib.h>

#include "base/error.h"
#include "base/strings.h"

namespace octet::io {
namespace {

uint32_t checksum(std::string_view bytes) {
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

// All members of a gzip file, one after the other.
std::string gunzip(const std::string& path, std::string_view bytes) {
  constexpr int kGzipWindow = 15 + 16;
  z_stream stream{};
  if (::inflateInit2(&stream, kGzipWindow) != Z_OK) fail(path, "the decompressor cannot start");
  std::string text;
  int status = Z_OK;
  size_t position = 0;
  char chunk[1 << 16];
  while (status != Z_STREAM_END || position < bytes.size()) {
    if (status == Z_STREAM_END) ::inflateReset(&stream);
    const size_t available = std::min<size_t>(bytes.size() - position, 1 << 30);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data() + position));
    stream.avail_in = static_cast<uInt>(available);
    stream.next_out = reinterpret_cast<Bytef*>(chunk);
    stream.avail_out = sizeof(chunk);
    status = ::inflate(&stream, Z_NO_FLUSH);
    position += available - stream.avail_in;
    text.append(chunk, sizeof(chunk) - stream.avail_out);
    if (status != Z_OK && status != Z_STREAM_END) break;
  }
  ::inflateEnd(&stream);
  if (status != Z_STREAM_END) fail(path, "the gzip data is cut short or damaged");
  return text;
}

Json parse_line(std::string_view line, const std::string& path, int64_t number) {
  const std::string where = fmt::format("{}, line {}", path, number);
  Json row;
  try {
    row = parse_json(line, where);
  } catch (const Error& error) {
    // The parser sees one line, so its own count of lines says nothing.
    std::string message = error.what();
    constexpr std::string_view kLine = "at line 1, column";
    if (const size_t at = message.find(kLine); at != std::string::npos) {
      message.replace(at, kLine.size(), "at column");
    }
    throw Error(message);
  }
  if (!row.is_object()) fail(where, "a JSON object is required, but {} is given", row.type_name());
  return row;
}

std::vector<Json> parse_lines(std::string_view text, const std::string& path) {
  std::vector<Json> rows;
  int64_t number = 0;
  int64_t blank_line = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (trim(line).empty()) {
      if (blank_line == 0) blank_line = number;
      continue;
    }
    if (blank_line > 0) {
      fail(fmt::format("{}, line {}", path, blank_line),
           "a JSON object is required, but the line is blank; blank lines may stand only at the "
           "end");
    }
    rows.push_back(parse_line(line, path, number));
  }
  return rows;
}

std::vector<Json> parse_array(std::string_view text, const std::string& path) {
  Json array = parse_json(text, path);
  std::vector<Json> rows;
  for (Json& row : array) {
    if (!row.is_object()) {
      fail(path, "row {} must be a JSON object, but is {}", rows.size() + 1, row.type_name());
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

bool Dataset::has_column(const std::string& name) const {
  return std::ranges::count(columns, name) > 0;
}

Dataset read_jsonl(const std::string& path) {
  std::string content = read_file(path);
  Dataset dataset;
  dataset.path = path;
  dataset.num_bytes = std::ssize(content);
  dataset.crc32 = checksum(content);
  if (content.starts_with("\x1f\x8b")) content = gunzip(path, content);
  std::string_view text = content;
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // a byte order mark
  dataset.rows = trim(text).starts_with('[') ? parse_array(text, path) : parse_lines(text, path);
  if (dataset.rows.empty()) fail(path, "at least one row is required, but the dataset is empty");
  std::unordered_set<std::string> seen;
  for (const Json& row : dataset.rows) {
    for (const auto& [name, value] : row.items()) {
      if (seen.insert(name).second) dataset.columns.push_back(name);
    }
  }
  return dataset;
}

}  // namespace octet::io
