// File length, banned calls, and other rules that a compiler does not check.
#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "base/strings.h"
#include "rules/sources.h"

namespace octet::rules {
namespace {

constexpr size_t kMaxLines = 800;
constexpr size_t kManyLines = 500;

// Files above kManyLines, each with the reason why it is not cut.
const std::map<std::string, std::string> kLongFiles = {};

std::vector<SourceFile> all_files() {
  std::vector<SourceFile> files;
  for (const char* root : {"src", "tests", "bench", "tools"}) {
    for (SourceFile& file : source_files(root)) files.push_back(std::move(file));
  }
  return files;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Whether `word` stands in `code` as a whole word, followed by `next` after blanks (0: anything).
bool has_word(std::string_view code, std::string_view word, char next) {
  for (size_t at = 0; (at = code.find(word, at)) != std::string_view::npos; ++at) {
    if (at > 0 && is_word(code[at - 1])) continue;
    const std::string_view after = code.substr(at + word.size());
    if (!after.empty() && is_word(after[0])) continue;
    if (next == 0 || trim(after).starts_with(next)) return true;
  }
  return false;
}

struct Ban {
  std::string word;
  char next;                      // what must follow for it to count; 0: anything
  std::set<std::string> allowed;  // paths, or folders ending in '/'
  std::string instead;
};

const std::vector<Ban>& bans() {
  // Memory without an owner, and printing and ending, which are the program's business alone.
  static const std::string app = "src/app/";
  static const std::vector<Ban> list = {
      {"printf", '(', {app}, "log_info or an Error"},
      {"fprintf", '(', {app}, "log_info or an Error"},
      {"puts", '(', {app}, "log_info or an Error"},
      {"fputs", '(', {app}, "log_info or an Error"},
      {"perror", '(', {app}, "an Error"},
      {"cout", 0, {app}, "log_info or an Error"},
      {"cerr", 0, {app}, "log_info or an Error"},
      {"clog", 0, {app}, "log_info or an Error"},
      {"exit", '(', {app}, "an Error"},
      {"_exit", '(', {app, "src/reward/"}, "an Error"},  // a child process after a failed exec
      {"quick_exit", '(', {app}, "an Error"},
      {"abort", '(', {}, "OCTET_ASSERT or an Error"},
      {"terminate", '(', {}, "OCTET_ASSERT or an Error"},
      {"assert", '(', {}, "OCTET_ASSERT"},
      {"rand", '(', {}, "base/rng.h"},
      {"srand", '(', {}, "base/rng.h"},
      {"random_device", 0, {}, "base/rng.h"},
      {"mt19937", 0, {}, "base/rng.h"},
      {"default_random_engine", 0, {}, "base/rng.h"},
      {"malloc", '(', {}, "std::vector or tensor::Buffer"},
      {"calloc", '(', {}, "std::vector or tensor::Buffer"},
      {"realloc", '(', {}, "std::vector or tensor::Buffer"},
      {"free",
       '(',
       {"src/tensor/buffer.cpp", "src/backend/cpu/context.cpp"},
       "std::vector or tensor::Buffer"},
      {"aligned_alloc",
       '(',
       {"src/tensor/buffer.cpp", "src/backend/cpu/context.cpp"},
       "std::vector or tensor::Buffer"},
      {"new", 0, {}, "std::make_unique"},
      {"delete", 0, {}, "std::unique_ptr"},
      {"system", '(', {}, "nothing: no shell"},
  };
  return list;
}

bool is_allowed(const Ban& ban, const std::string& path) {
  return std::ranges::any_of(ban.allowed, [&](const std::string& place) {
    return place.ends_with('/') ? path.starts_with(place) : path == place;
  });
}

// "= delete" declares; it frees nothing.
bool counts(const Ban& ban, std::string_view code) {
  if (ban.word != "delete") return has_word(code, ban.word, ban.next);
  const size_t at = code.find("delete");
  return has_word(code, "delete", 0) && !trim(code.substr(0, at)).ends_with('=');
}

TEST(Source, FilesStayShort) {
  for (const SourceFile& file : all_files()) {
    EXPECT_LE(file.lines.size(), kMaxLines) << file.path;
    if (file.lines.size() > kManyLines) {
      EXPECT_TRUE(kLongFiles.contains(file.path))
          << file.path << " has " << file.lines.size()
          << " lines: cut it, or list it in kLongFiles with the reason";
    }
  }
}

TEST(Source, HeadersAreGuarded) {
  for (const SourceFile& file : all_files()) {
    if (!file.path.ends_with(".h") && !file.path.ends_with(".cuh")) continue;
    const bool guarded = std::ranges::find(file.lines, "#pragma once") != file.lines.end();
    // Highway includes such a file once per instruction set.
    const bool per_target = std::ranges::any_of(file.lines, [](const std::string& line) {
      return line.find("HWY_TARGET_TOGGLE") != std::string::npos;
    });
    EXPECT_TRUE(guarded || per_target) << file.path << " has no #pragma once";
  }
}

TEST(Source, NothingIsLeftForLater) {
  const std::vector<std::string> marks = {
      "TO"
      "DO",
      "FIX"
      "ME",
      "XX"
      "X",
      "HA"
      "CK"};
  for (const SourceFile& file : all_files()) {
    for (size_t i = 0; i < file.lines.size(); ++i) {
      for (const std::string& mark : marks) {
        EXPECT_FALSE(has_word(file.lines[i], mark, 0)) << file.path << ":" << i + 1;
      }
    }
  }
}

TEST(Source, TheLibraryNeitherPrintsNorEndsTheProgram) {
  for (const SourceFile& file : source_files("src")) {
    const auto code = code_only(file.lines);
    for (size_t i = 0; i < code.size(); ++i) {
      const std::string_view line = trim(code[i]);
      if (line.starts_with("#")) continue;
      for (const Ban& ban : bans()) {
        if (is_allowed(ban, file.path)) continue;
        EXPECT_FALSE(counts(ban, line))
            << file.path << ":" << i + 1 << " uses " << ban.word << "; take " << ban.instead;
      }
    }
  }
}

TEST(Source, TheScannerSeesCodeAlone) {
  const auto code = code_only({"a(\"new\") + 'n'; // new", "b /* new", "new */ c 1'000 d",
                               "R\"x(new", ")\" )x\" e", "\"\\\"new\" f"});
  const std::vector<std::string> expected = {"a(     ) +    ;       ",
                                             "b       ",
                                             "       c 1'000 d",
                                             "       ",
                                             "        e",
                                             "        f"};
  ASSERT_EQ(code.size(), expected.size());
  for (size_t i = 0; i < code.size(); ++i) {
    EXPECT_EQ(split(std::string(trim(code[i])), '\n'), split(std::string(trim(expected[i])), '\n'));
  }
  EXPECT_TRUE(has_word("x = new T", "new", 0));
  EXPECT_FALSE(has_word("renew(x)", "new", 0));
  EXPECT_TRUE(has_word("std::exit (1)", "exit", '('));
  EXPECT_FALSE(has_word("exit_code(1)", "exit", '('));
  EXPECT_FALSE(counts({"delete", 0, {}, ""}, "A(const A&) = delete;"));
  EXPECT_TRUE(counts({"delete", 0, {}, ""}, "delete pointer;"));
}

}  // namespace
}  // namespace octet::rules
