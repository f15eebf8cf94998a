// Drives the built program as a user would: arguments, standard input, and what comes back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace octet::test {

using Json = nlohmann::ordered_json;

using Arguments = std::vector<std::string>;
Arguments operator+(Arguments first, const Arguments& second);

struct Outcome {
  int exit_code = -1;  // 128 + the signal where one ended it
  std::string out;
  std::string err;

  std::vector<Json> lines() const;  // of standard output
  Json line(size_t index) const { return lines().at(index); }
};

Outcome run_program(const std::string& program, const Arguments& arguments,
                    const std::string& input = "");
Outcome octet(const Arguments& arguments, const std::string& input = "");

// The numbers of a JSON array as float32, null as NaN.
std::vector<float> floats(const Json& array);
std::vector<int32_t> ids(const Json& array);
// {"ids":[…]} and a line feed.
std::string ids_line(const std::vector<int32_t>& values);

// An empty folder that goes with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string path(const std::string& name = "") const { return (root_ / name).string(); }

 private:
  std::filesystem::path root_;
};

void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);

inline const std::string kGolden = OCTET_SOURCE_DIR "/tests/golden/data/";

}  // namespace octet::test
