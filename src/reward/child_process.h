// A program that is given lines and answers lines.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <sys/types.h>

namespace octet::reward {

using Deadline = std::chrono::steady_clock::time_point;

enum class ExchangeStatus { kAnswered, kTimedOut, kEnded, kTooLong };

// One child at a time, in a process group of its own, which ends with this process even where that
// is killed; its standard error is ours. Not thread-safe.
class ChildProcess {
 public:
  ChildProcess() = default;
  ~ChildProcess() { stop(); }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Starts `command` by /bin/sh -c; returns "" or why it could not. None may be running.
  std::string start(const std::string& command);
  // Whether it was started, has not closed its output, and has said nothing unasked.
  bool ready();
  // Sends `line` and a newline and waits for a whole line, which comes without its newline.
  ExchangeStatus exchange(std::string_view line, Deadline deadline, std::string* answer);
  // Ends the whole process group and returns how the program ended: "exit code 3", "signal 11", or
  // "stopped" where it had to be stopped. Harmless where none runs.
  std::string stop();

 private:
  // Appends what can be read now; false at the end of the output.
  bool read_available();

  pid_t pid_ = -1;
  int input_ = -1;   // we write
  int output_ = -1;  // we read
  int guard_ = -1;   // open while the group may run
  std::string received_;
};

}  // namespace octet::reward
