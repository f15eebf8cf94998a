// The program: signals, messages and exit codes. 0 done, 1 failed, 2 wrong usage or config,
// 3 stopped by the guard.
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string_view>
#include <unistd.h>

#include "app/command_line.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"

namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

void print_message(std::string_view prefix, std::string_view message) {
  std::fprintf(stderr, "%.*s%.*s\n", static_cast<int>(prefix.size()), prefix.data(),
               static_cast<int>(message.size()), message.data());
}

// The first signal asks work to stop where its state is whole, the second ends the program.
extern "C" void on_signal(int number) {
  if (octet::interrupted()) _exit(128 + number);
  octet::request_interrupt();
}

void install_signals() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A reader that has gone shows as a failed write, which each writer reports.
  std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

int main(int argc, char** argv) {
  install_signals();
  octet::set_log_sink([](octet::LogLevel level, std::string_view message) {
    print_message(level == octet::LogLevel::kWarning ? "warning: " : "", message);
  });
  try {
    return octet::app::run_command_line(argc, argv);
  } catch (const octet::UsageError& error) {
    print_message("error: ", error.what());
    return kWrongUsage;
  } catch (const octet::Error& error) {
    print_message("error: ", error.what());
  } catch (const std::bad_alloc&) {
    print_message("error: ", "[memory] the machine has none left; set --device-memory-limit");
  } catch (const std::exception& error) {
    print_message("internal error: ", error.what());
  }
  return kFailed;
}
