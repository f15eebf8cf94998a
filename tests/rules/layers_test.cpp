// Who may include whom: the table of ARCHITECTURE.md. Change both together.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <gtest/gtest.h>

#include "base/strings.h"
#include "rules/sources.h"

namespace octet::rules {
namespace {

using Folders = std::set<std::string>;

// What each folder of src may include beside itself.
const std::map<std::string, Folders>& table() {
  static const Folders library = {"base",    "tensor", "ops",    "io",    "text",   "model",
                                  "rollout", "rl",     "reward", "train", "observe"};
  static const Folders everything = [] {
    Folders all = library;
    all.insert({"loop", "backend/cpu", "backend/cuda", "bench"});
    return all;
  }();
  static const std::map<std::string, Folders> allowed = {
      {"base", {}},
      {"tensor", {"base"}},
      {"ops", {"tensor", "base"}},
      {"backend/cpu", {"ops", "tensor", "base"}},
      {"backend/cuda", {"ops", "tensor", "base"}},
      {"io", {"tensor", "base"}},
      {"text", {"base", "io"}},
      {"model", {"ops", "tensor", "io", "base"}},
      {"rollout", {"model", "text", "ops", "tensor", "base"}},
      {"rl", {"ops", "tensor", "base"}},
      {"reward", {"text", "io", "base"}},
      {"train", {"model", "rl", "ops", "tensor", "io", "base"}},
      {"observe", {"io", "base"}},
      {"loop", library},
      {"bench", {"backend/cpu", "ops", "tensor", "base"}},
      {"app", everything},
  };
  return allowed;
}

// The row of the table that a folder of src belongs to ("backend/cuda/device" to "backend/cuda").
std::string row_of(std::string folder) {
  while (!folder.empty() && !table().contains(folder)) {
    const size_t slash = folder.rfind('/');
    folder = slash == std::string::npos ? "" : folder.substr(0, slash);
  }
  return folder;
}

// The path of an `#include "path"` line.
std::optional<std::string> included(std::string_view line) {
  line = trim(line);
  if (!line.starts_with("#")) return std::nullopt;
  line = trim(line.substr(1));
  if (!line.starts_with("include")) return std::nullopt;
  line = trim(line.substr(7));
  if (!line.starts_with('"')) return std::nullopt;
  return std::string(line.substr(1, line.find('"', 1) - 1));
}

TEST(Layers, AFolderIncludesOnlyWhatTheTableAllows) {
  const auto files = source_files("src");
  ASSERT_FALSE(files.empty());
  for (const SourceFile& file : files) {
    const std::string from = row_of(file.folder);
    ASSERT_FALSE(from.empty()) << file.path << ": its folder is not in the table";
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const auto path = included(file.lines[i]);
      if (!path) continue;
      const size_t slash = path->rfind('/');
      const std::string to = row_of(slash == std::string::npos ? "" : path->substr(0, slash));
      EXPECT_FALSE(to.empty()) << file.path << ":" << i + 1 << " includes \"" << *path
                               << "\", which is not written from src";
      EXPECT_TRUE(to.empty() || to == from || table().at(from).contains(to))
          << file.path << ":" << i + 1 << ": " << from << " may not include " << to;
    }
  }
}

TEST(Layers, TheTableHasNoCycle) {
  Folders done;
  for (size_t before = 1; before != 0;) {
    before = 0;
    for (const auto& [folder, allowed] : table()) {
      if (done.contains(folder)) continue;
      if (std::ranges::all_of(allowed, [&](const auto& other) { return done.contains(other); })) {
        done.insert(folder);
        ++before;
      }
    }
  }
  EXPECT_EQ(done.size(), table().size());
}

TEST(Layers, TheReaderSeesAnInclude) {
  EXPECT_EQ(included("  # include \"base/error.h\"  // why"), "base/error.h");
  EXPECT_EQ(included("#include <vector>"), std::nullopt);
  EXPECT_EQ(row_of("backend/cuda/device"), "backend/cuda");
  EXPECT_EQ(row_of("nowhere"), "");
}

}  // namespace
}  // namespace octet::rules
