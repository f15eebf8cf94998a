#include "loop/run_folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <sys/file.h>
#include <unistd.h>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/log.h"
#include "base/strings.h"
#include "observe/metrics.h"

namespace octet::loop {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kAside = ".tmp";  // being filled
constexpr const char* kOld = ".old";    // being replaced

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error && fs::is_directory(path)) return;
  // Name the part of the path that stands in the way.
  std::string obstacle;
  for (fs::path part = path; !part.empty() && part != part.parent_path();
       part = part.parent_path()) {
    std::error_code ignored;
    if (fs::exists(part, ignored) && !fs::is_directory(part, ignored)) obstacle = part.string();
  }
  fail(path, "the folder cannot be made: {}; choose another run.dir",
       obstacle.empty() ? error.message() : obstacle + " is a file");
}

void remove_all(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail(path, "it cannot be removed: {}", error.message());
}

void sync(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool done = file >= 0 && ::fsync(file) == 0;
  const std::string reason = std::strerror(errno);
  if (file >= 0) ::close(file);
  if (!done) fail(path, "it cannot be brought to disk: {}", reason);
}

// The files below `folder` but its manifest, by relative path, with their sizes.
std::map<std::string, uint64_t> files_below(const std::string& folder) {
  std::map<std::string, uint64_t> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) continue;
    const std::string name = entry.path().lexically_relative(folder).string();
    if (name != kManifest) files[name] = entry.is_regular_file() ? entry.file_size() : 0;
  }
  return files;
}

void write_manifest(const std::string& folder) {
  Json files = Json::object();
  for (const auto& [name, size] : files_below(folder)) {
    files[name] = {{"size", size}, {"crc32c", crc32c_of_file(folder + "/" + name)}};
  }
  write_file_atomically(folder + "/" + kManifest, Json{{"files", files}}.dump(1) + "\n");
}

// What was being replaced at `path` comes back where its successor is not in place yet.
void settle(const std::string& path) {
  const std::string old = path + kOld;
  if (fs::exists(old) && !fs::exists(path)) fs::rename(old, path);
  remove_all(old);
}

// Fills PATH.tmp and puts it in place of PATH, which stays as PATH.old until then: whenever the
// process is killed, settle() finds one of the two whole.
std::string save_aside(const std::string& path, bool with_manifest,
                       const std::function<void(const std::string&)>& fill) {
  const std::string aside = path + kAside;
  remove_all(aside);
  make_folder(aside);
  try {
    fill(aside);
    if (with_manifest) write_manifest(aside);
    for (const auto& entry : fs::recursive_directory_iterator(aside)) sync(entry.path().string());
    sync(aside);
    settle(path);
    if (fs::exists(path)) fs::rename(path, path + kOld);
    fs::rename(aside, path);
    sync(fs::path(path).parent_path().string());
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(aside, ignored);
    throw;
  }
  settle(path);
  return path;
}

// The N of a name "step-N" with an optional `suffix`, or -1.
int64_t step_of(std::string_view name, std::string_view suffix) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix) || !name.ends_with(suffix)) return -1;
  name.remove_prefix(kPrefix.size());
  if (name.size() < suffix.size()) return -1;
  name.remove_suffix(suffix.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  return error == std::errc() && end == name.data() + name.size() ? step : -1;
}

// The entries of a folder named step-N with `suffix`; none where there is no such folder.
std::vector<CheckpointPlace> steps_in(const std::string& folder, std::string_view suffix) {
  std::vector<CheckpointPlace> places;
  if (!fs::is_directory(folder)) return places;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int64_t step = step_of(entry.path().filename().string(), suffix);
    if (step >= 0) places.push_back({step, entry.path().string()});
  }
  std::ranges::sort(places, std::ranges::greater(), &CheckpointPlace::step);
  return places;
}

}  // namespace

RunFolder RunFolder::create(const std::string& dir, const std::string& config_toml,
                            const Json& provenance) {
  make_folder(dir);
  RunFolder run(dir);
  run.lock();
  if (!fs::is_empty(dir)) {
    fail(dir,
         "a new run needs an empty folder, but this one holds {}; continue that run with --resume, "
         "name another run.dir, or remove the folder",
         fs::exists(run.config_path()) ? "another run" : "other files");
  }
  try {
    run.write_config(config_toml);
    run.write_provenance(provenance);
  } catch (...) {
    run.discard();
    throw;
  }
  return run;
}

RunFolder RunFolder::open(const std::string& dir) {
  RunFolder run(dir);
  if (!fs::is_regular_file(run.config_path())) {
    fail(dir, "--resume needs the folder of an earlier run, but there is no config.toml in it");
  }
  run.lock();
  for (const char* name : {"/model", "/adapter"}) {
    remove_all(dir + name + kAside);
    settle(dir + name);
  }
  for (const auto& [step, path] : steps_in(run.checkpoints_path(), kAside)) remove_all(path);
  for (const auto& [step, path] : steps_in(run.checkpoints_path(), kOld)) {
    settle(path.substr(0, path.size() - std::string_view(kOld).size()));
  }
  return run;
}

RunFolder::RunFolder(RunFolder&& other) noexcept
    : dir_(std::move(other.dir_)), lock_(std::exchange(other.lock_, -1)) {}

RunFolder& RunFolder::operator=(RunFolder&& other) noexcept {
  std::swap(dir_, other.dir_);
  std::swap(lock_, other.lock_);
  return *this;
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) ::close(lock_);
}

void RunFolder::lock() {
  lock_ = ::open(dir_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) fail(dir_, "the folder cannot be opened: {}", std::strerror(errno));
  // Some network file systems know no locks; there the user watches out.
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    fail(dir_, "another process is running in this folder; wait for it or name another run.dir");
  }
}

void RunFolder::write_config(const std::string& config_toml) {
  write_file_atomically(config_path(), config_toml);
}

void RunFolder::discard() {
  std::error_code ignored;  // what cannot be removed stays
  fs::remove(config_path(), ignored);
  fs::remove(provenance_path(), ignored);
  fs::remove(dir_, ignored);
}

void RunFolder::write_provenance(const Json& provenance) {
  write_file_atomically(provenance_path(), provenance.dump(2) + "\n");
}

std::string RunFolder::save_checkpoint(int64_t step,
                                       const std::function<void(const std::string&)>& fill) const {
  return save_aside(checkpoints_path() + "/" + observe::step_name(step), true, fill);
}

std::string RunFolder::save_folder(const std::string& name,
                                   const std::function<void(const std::string&)>& fill) const {
  return save_aside(dir_ + "/" + name, false, fill);
}

std::vector<CheckpointPlace> RunFolder::checkpoints() const {
  return steps_in(checkpoints_path(), "");
}

std::optional<CheckpointPlace> RunFolder::newest_whole_checkpoint(
    std::vector<std::string>& problems) const {
  for (const CheckpointPlace& place : checkpoints()) {
    const std::string problem = checkpoint_problem(place.path);
    if (problem.empty()) return place;
    problems.push_back(fmt::format("{}: {}", place.path, problem));
  }
  return std::nullopt;
}

void RunFolder::rotate_checkpoints(int64_t limit) const {
  if (limit <= 0) return;
  const std::vector<CheckpointPlace> places = checkpoints();
  for (size_t i = static_cast<size_t>(limit); i < places.size(); ++i) remove_all(places[i].path);
}

void RunFolder::drop_after(int64_t step) const {
  for (const auto& places : {checkpoints(), steps_in(completions_path(), ".jsonl")}) {
    for (const CheckpointPlace& place : places) {
      if (place.step > step) remove_all(place.path);
    }
  }
}

std::string checkpoint_problem(const std::string& folder) {
  try {
    const std::string manifest_path = folder + "/" + kManifest;
    if (!fs::is_regular_file(manifest_path)) return "manifest.json is missing";
    const Json manifest = read_json_file(manifest_path);
    const Json listed = manifest.is_object() ? manifest.value("files", Json()) : Json();
    if (!listed.is_object()) return "manifest.json lists no files";
    std::map<std::string, uint64_t> found = files_below(folder);
    for (const auto& [name, entry] : listed.items()) {
      const auto file = found.find(name);
      if (file == found.end()) return fmt::format("{} is missing", name);
      if (!entry.is_object() || !entry.contains("size") || !entry["size"].is_number_unsigned() ||
          !entry.contains("crc32c") || !entry["crc32c"].is_number_unsigned()) {
        return fmt::format("manifest.json gives no size and checksum for {}", name);
      }
      const uint64_t size = entry["size"].get<uint64_t>();
      if (file->second != size) {
        return fmt::format("{} should have {} bytes, but has {}", name, size, file->second);
      }
      if (crc32c_of_file(folder + "/" + name) != entry["crc32c"].get<uint64_t>()) {
        return fmt::format("{} has changed since it was written (its checksum differs)", name);
      }
      found.erase(file);
    }
    if (!found.empty()) return fmt::format("{} is not in manifest.json", found.begin()->first);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace octet::loop
