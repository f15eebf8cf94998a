#include "system/program.h"

#include <cmath>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <limits>
#include <spawn.h>
#include <sstream>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace octet::test {

Arguments operator+(Arguments first, const Arguments& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<Json> Outcome::lines() const {
  std::vector<Json> result;
  std::istringstream stream(out);
  for (std::string line; std::getline(stream, line);) result.push_back(Json::parse(line));
  return result;
}

Outcome run_program(const std::string& program, const Arguments& arguments,
                    const std::string& input) {
  // Files instead of pipes: nothing can wait for anything.
  const TemporaryFolder folder;
  write_text(folder.path("in"), input);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, folder.path("in").c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, folder.path("out").c_str(), O_WRONLY | O_CREAT,
                                   0600);
  posix_spawn_file_actions_addopen(&actions, 2, folder.path("err").c_str(), O_WRONLY | O_CREAT,
                                   0600);
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + program);
  int status = 0;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, read_text(folder.path("out")), read_text(folder.path("err"))};
}

Outcome octet(const Arguments& arguments, const std::string& input) {
  return run_program(OCTET_PROGRAM, arguments, input);
}

std::vector<float> floats(const Json& array) {
  std::vector<float> values;
  for (const Json& value : array) {
    values.push_back(value.is_null() ? std::numeric_limits<float>::quiet_NaN()
                                     : value.get<float>());
  }
  return values;
}

std::vector<int32_t> ids(const Json& array) { return array.get<std::vector<int32_t>>(); }

std::string ids_line(const std::vector<int32_t>& values) {
  return Json{{"ids", values}}.dump() + "\n";
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "octet-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
  root_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace octet::test
