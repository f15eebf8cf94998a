#include "base/strings.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <numeric>
#include <unistd.h>

#include "base/error.h"

namespace octet {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitution = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitution});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_name(std::string_view name, std::span<const std::string> candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const int length = byte < 0x80                   ? 1
                       : byte >= 0xC2 && byte < 0xE0 ? 2
                       : byte >= 0xE0 && byte < 0xF0 ? 3
                       : byte >= 0xF0 && byte < 0xF5 ? 4
                                                     : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (int k = 1; k < length; ++k) {
      if ((static_cast<uint8_t>(text[i + k]) & 0xC0) != 0x80) return false;
    }
    if (length > 2) {
      const auto second = static_cast<uint8_t>(text[i + 1]);
      if ((byte == 0xE0 && second < 0xA0) || (byte == 0xED && second > 0x9F) ||
          (byte == 0xF0 && second < 0x90) || (byte == 0xF4 && second > 0x8F)) {
        return false;
      }
    }
    i += length;
  }
  return true;
}

std::string format_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (std::abs(value) >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

int64_t parse_bytes(std::string_view text, std::string_view where) {
  const std::string_view trimmed = trim(text);
  double value = 0;
  const auto [end, error] = std::from_chars(trimmed.data(), trimmed.data() + trimmed.size(), value);
  std::string unit(trim(trimmed.substr(end - trimmed.data())));
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  double factor = 0;
  if (unit.empty() || unit == "b") factor = 1;
  if (unit == "kib" || unit == "k") factor = 1024.0;
  if (unit == "mib" || unit == "m") factor = 1024.0 * 1024;
  if (unit == "gib" || unit == "g") factor = 1024.0 * 1024 * 1024;
  if (unit == "kb") factor = 1e3;
  if (unit == "mb") factor = 1e6;
  if (unit == "gb") factor = 1e9;
  if (error != std::errc() || factor == 0 || !(value > 0) || value * factor > 9e18) {
    fail_usage(where, "a size must look like 5GiB, 800MiB or 16GB, but is \"{}\"", text);
  }
  return static_cast<int64_t>(value * factor);
}

std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr || std::filesystem::is_directory(path)) {
    const std::string reason = file == nullptr ? std::strerror(errno) : "it is a folder";
    if (file != nullptr) std::fclose(file);
    fail(path, "the file cannot be read: {}; check the path", reason);
  }
  std::string content;
  char chunk[1 << 16];
  for (size_t count; (count = std::fread(chunk, 1, sizeof(chunk), file)) > 0;)
    content.append(chunk, count);
  const bool broken = std::ferror(file) != 0;
  std::fclose(file);
  if (broken) fail(path, "reading the file broke off; check the disk");
  return content;
}

void write_file_atomically(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".tmp";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail(path, "the file cannot be written: {}", std::strerror(errno));
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t count = ::write(file, content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const std::string reason = std::strerror(errno);
      ::close(file);
      ::unlink(temporary.c_str());
      fail(path, "writing the file broke off: {}; what stood there before is untouched", reason);
    }
    done += static_cast<size_t>(count);
  }
  const bool synced = ::fsync(file) == 0;
  ::close(file);
  if (!synced || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    ::unlink(temporary.c_str());
    fail(path, "the file cannot be put in place: {}; what stood there before is untouched", reason);
  }
}

}  // namespace octet
