#include "rules/sources.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include <fmt/core.h>

#include "base/strings.h"

namespace octet::rules {

std::vector<SourceFile> source_files(const std::string& root) {
  namespace fs = std::filesystem;
  const std::set<std::string> kinds = {".h", ".cpp", ".cu", ".cuh"};
  const fs::path top = fs::path(OCTET_SOURCE_DIR) / root;
  std::vector<SourceFile> files;
  if (!fs::is_directory(top)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(top)) {
    if (!entry.is_regular_file() || !kinds.contains(entry.path().extension().string())) continue;
    const fs::path relative = entry.path().lexically_relative(top);
    files.push_back({root + "/" + relative.string(), relative.parent_path().string(),
                     split(read_file(entry.path().string()), '\n')});
    if (files.back().lines.back().empty()) files.back().lines.pop_back();
  }
  std::ranges::sort(files, {}, &SourceFile::path);
  return files;
}

namespace {

enum class In { kCode, kString, kCharacter, kComment, kRaw };

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

}  // namespace

std::vector<std::string> code_only(const std::vector<std::string>& lines) {
  std::vector<std::string> out;
  In state = In::kCode;
  std::string raw_end;
  for (const std::string& line : lines) {
    std::string code(line.size(), ' ');
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string_view rest = std::string_view(line).substr(i);
      switch (state) {
        case In::kCode:
          if (rest.starts_with("//")) {
            i = line.size();
          } else if (rest.starts_with("/*")) {
            state = In::kComment;
            ++i;
          } else if (rest.starts_with("R\"") && (i == 0 || !is_word(line[i - 1]))) {
            raw_end = fmt::format("){}\"", line.substr(i + 2, line.find('(', i) - i - 2));
            state = In::kRaw;
            ++i;
          } else if (line[i] == '"') {
            state = In::kString;
          } else if (line[i] == '\'' && (i == 0 || !is_word(line[i - 1]))) {
            state = In::kCharacter;  // not the separator of 1'000
          } else {
            code[i] = line[i];
          }
          break;
        case In::kString:
        case In::kCharacter:
          if (line[i] == '\\') {
            ++i;
          } else if (line[i] == (state == In::kString ? '"' : '\'')) {
            state = In::kCode;
          }
          break;
        case In::kComment:
          if (rest.starts_with("*/")) {
            state = In::kCode;
            ++i;
          }
          break;
        case In::kRaw:
          if (rest.starts_with(raw_end)) {
            i += raw_end.size() - 1;
            state = In::kCode;
          }
          break;
      }
    }
    out.push_back(code);
  }
  return out;
}

}  // namespace octet::rules
