// Small helpers on text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace octet {

// The candidate with the smallest edit distance to `name`, or "" where none is near (more than a
// third of the letters differ). For "did you mean" in errors.
std::string nearest_name(std::string_view name, std::span<const std::string> candidates);

std::vector<std::string> split(std::string_view text, char separator);
std::string_view trim(std::string_view text);
bool is_valid_utf8(std::string_view text);

// "1.50 GiB", "384 B"; and back: "5GiB", "16 GB", "1048576" (throws UsageError naming `where`).
std::string format_bytes(int64_t bytes);
int64_t parse_bytes(std::string_view text, std::string_view where);

// The whole file as bytes, and an atomic write: beside the target, synced, then renamed.
std::string read_file(const std::string& path);
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace octet
