// What a run leaves on disk: DIR/config.toml, provenance.json, kernels.json (where a device chose
// kernels by timing), metrics.jsonl, events.jsonl, completions/, tensorboard/,
// checkpoints/step-000020/, model/.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace octet::loop {

struct CheckpointPlace {
  int64_t step = 0;
  std::string path;
};

// One process at a time holds a run's folder (a lock that ends with the process). All throw Error
// naming the path where the file system refuses.
class RunFolder {
 public:
  // Makes the folder of a new run and writes config.toml and provenance.json. Error where it cannot
  // be made (a parent is a file) or holds anything already: name another run.dir, or resume.
  static RunFolder create(const std::string& dir, const std::string& config_toml,
                          const Json& provenance);
  // Opens the folder of an earlier run, to resume it. Error where there is none. What an
  // interrupted write left aside is removed, and what it was replacing comes back.
  static RunFolder open(const std::string& dir);

  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&& other) noexcept;
  ~RunFolder();

  const std::string& dir() const { return dir_; }
  std::string config_path() const { return dir_ + "/config.toml"; }
  std::string choices_path() const { return dir_ + "/kernels.json"; }  // of the device, if any
  std::string provenance_path() const { return dir_ + "/provenance.json"; }
  std::string metrics_path() const { return dir_ + "/metrics.jsonl"; }
  std::string events_path() const { return dir_ + "/events.jsonl"; }
  std::string completions_path() const { return dir_ + "/completions"; }
  std::string tensorboard_path() const { return dir_ + "/tensorboard"; }
  std::string checkpoints_path() const { return dir_ + "/checkpoints"; }

  void write_config(const std::string& config_toml);
  void write_provenance(const Json& provenance);
  // Takes back create(): for a run that failed before it had anything to keep.
  void discard();

  // Writes a checkpoint whole or not at all: `fill` writes files into a folder aside, then
  // manifest.json gets each file's size and CRC-32C, all is synced and the folder renamed into
  // place. One of the same step goes only then. Where `fill` throws nothing is left. Returns the
  // checkpoint's path.
  std::string save_checkpoint(int64_t step,
                              const std::function<void(const std::string& folder)>& fill) const;

  // The same for the folder DIR/`name` (the exported model), without a manifest.
  std::string save_folder(const std::string& name,
                          const std::function<void(const std::string& folder)>& fill) const;

  // By step, newest first; not yet looked into.
  std::vector<CheckpointPlace> checkpoints() const;

  // The newest checkpoint that is whole, or none. What is wrong with those passed over is appended
  // to `problems`, one line each.
  std::optional<CheckpointPlace> newest_whole_checkpoint(std::vector<std::string>& problems) const;

  // Deletes the oldest checkpoints until `limit` are left; 0 keeps all.
  void rotate_checkpoints(int64_t limit) const;

  // Deletes checkpoints/ and completions/ of steps beyond `step`: a resumed run makes them again.
  void drop_after(int64_t step) const;

 private:
  explicit RunFolder(std::string dir) : dir_(std::move(dir)) {}
  void lock();
  std::string dir_;
  int lock_ = -1;
};

// Why a checkpoint's folder is not whole (a file missing, cut short, changed or not listed), or "".
std::string checkpoint_problem(const std::string& folder);

}  // namespace octet::loop
