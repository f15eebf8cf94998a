// The project's own sources, as the rules see them.
#pragma once

#include <string>
#include <vector>

namespace octet::rules {

struct SourceFile {
  std::string path;    // "src/base/error.h"
  std::string folder;  // below its root: "base", "backend/cpu"; "" at the root itself
  std::vector<std::string> lines;
};

// The *.h, *.cpp, *.cu and *.cuh files below `root` ("src"), in order of their paths.
std::vector<SourceFile> source_files(const std::string& root);

// The lines with comments and the inside of string and character literals blanked out.
std::vector<std::string> code_only(const std::vector<std::string>& lines);

}  // namespace octet::rules
