#include "reward/child_process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

extern char** environ;

namespace octet::reward {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kMaxAnswerBytes = size_t{64} << 20;
constexpr milliseconds kGrace{200};  // to end by itself after its pipes are closed
// Becomes the command $1. Beside it in the group, but no child of it, a guard waits for the end of
// descriptor 3, which comes however our process ends, and kills the group.
constexpr int kGuardFd = 3;
constexpr const char* kGuarded =
    "( (read -r line <&3; kill -KILL 0) & ) </dev/null >/dev/null 2>&1; "
    "exec 3<&-; exec /bin/sh -c \"$1\"";

void close_fd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

// Keeps a write to a closed pipe from ending this process: SIGPIPE is blocked in this thread, and
// one that our write raised is taken away.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeBlock() {
    if (!was_pending_) {
      const timespec now{0, 0};
      while (sigtimedwait(&sigpipe_, nullptr, &now) == -1 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

// Waits for the child to end without reaping it, so that its id (and group) stays ours.
bool ends_within(pid_t pid, milliseconds limit) {
  const Deadline deadline = steady_clock::now() + limit;
  while (true) {
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return true;
    if (info.si_pid == pid) return true;
    if (steady_clock::now() >= deadline) return false;
    usleep(2000);
  }
}

}  // namespace

std::string ChildProcess::start(const std::string& command) {
  int to_child[2] = {-1, -1};
  int from_child[2] = {-1, -1};
  int guard[2] = {-1, -1};
  if (pipe2(to_child, O_CLOEXEC) != 0 || pipe2(from_child, O_CLOEXEC) != 0 ||
      pipe2(guard, O_CLOEXEC) != 0) {
    const std::string reason = fmt::format("no pipe: {}", std::strerror(errno));
    for (int* pipe : {to_child, from_child}) {
      close_fd(pipe[0]);
      close_fd(pipe[1]);
    }
    return reason;
  }
  fcntl(to_child[1], F_SETFL, O_NONBLOCK);
  fcntl(from_child[0], F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_child[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from_child[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, guard[0], kGuardFd);  // last: it may be one of these
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::string shell = "/bin/sh";
  std::string flag = "-c";
  std::string guarded = kGuarded;
  std::string text = command;
  char* const arguments[] = {shell.data(), flag.data(), guarded.data(),
                             shell.data(), text.data(), nullptr};
  const int error = posix_spawn(&pid_, "/bin/sh", &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close_fd(to_child[0]);
  close_fd(from_child[1]);
  close_fd(guard[0]);
  guard_ = guard[1];
  input_ = to_child[1];
  output_ = from_child[0];
  if (error == 0) return "";
  pid_ = -1;
  stop();
  return fmt::format("/bin/sh could not be started: {}", std::strerror(error));
}

bool ChildProcess::read_available() {
  char block[1 << 16];
  while (received_.size() <= kMaxAnswerBytes) {
    const ssize_t count = read(output_, block, sizeof block);
    if (count > 0) {
      received_.append(block, static_cast<size_t>(count));
    } else if (count == 0) {
      return false;
    } else if (errno != EINTR) {
      return errno == EAGAIN;
    }
  }
  return true;
}

bool ChildProcess::ready() { return pid_ > 0 && read_available() && received_.empty(); }

ExchangeStatus ChildProcess::exchange(std::string_view line, Deadline deadline,
                                      std::string* answer) {
  const SigpipeBlock block;
  std::string message(line);
  message += '\n';
  size_t sent = 0;
  size_t searched = 0;
  while (true) {
    const size_t newline = received_.find('\n', searched);
    if (newline != std::string::npos && sent == message.size()) {
      *answer = received_.substr(0, newline);
      received_.erase(0, newline + 1);
      return ExchangeStatus::kAnswered;
    }
    if (received_.size() > kMaxAnswerBytes) return ExchangeStatus::kTooLong;
    if (newline == std::string::npos) searched = received_.size();

    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
    if (left <= 0) return ExchangeStatus::kTimedOut;
    pollfd waits[2] = {{output_, POLLIN, 0}, {input_, POLLOUT, 0}};
    const int wait_ms = static_cast<int>(std::min<decltype(left)>(left, 60'000));
    if (poll(waits, sent < message.size() ? 2 : 1, wait_ms) <= 0) continue;
    if (waits[1].revents != 0) {
      const ssize_t count = write(input_, message.data() + sent, message.size() - sent);
      if (count > 0) sent += static_cast<size_t>(count);
      if (count < 0 && errno != EAGAIN && errno != EINTR) return ExchangeStatus::kEnded;
    }
    if (waits[0].revents != 0 && !read_available() &&
        (sent < message.size() || received_.find('\n') == std::string::npos)) {
      return ExchangeStatus::kEnded;
    }
  }
}

std::string ChildProcess::stop() {
  close_fd(input_);
  close_fd(output_);
  received_.clear();
  if (pid_ <= 0) {
    close_fd(guard_);
    return "not running";
  }
  const bool ended = ends_within(pid_, kGrace);
  kill(-pid_, SIGKILL);  // the leader is not reaped yet, so the group is still this one
  int status = 0;
  while (waitpid(pid_, &status, 0) == -1 && errno == EINTR) {
  }
  pid_ = -1;
  close_fd(guard_);  // not before: the guard would leave no time to end
  if (!ended) return "stopped";
  if (WIFEXITED(status)) return fmt::format("exit code {}", WEXITSTATUS(status));
  return fmt::format("signal {}", WTERMSIG(status));
}

}  // namespace octet::reward
