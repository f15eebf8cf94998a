#include "app/backend_choice.h"

#include <algorithm>
#include <exception>
#include <unistd.h>

#include <fmt/format.h>

#include "backend/cpu/cpu_backend.h"
#include "base/error.h"
#include "base/strings.h"
#include "base/thread_pool.h"

namespace octet::app {
namespace {

void check_device(const DeviceArguments& arguments) {
  if (arguments.device == "cuda") {
    fail_usage("--device", "this build has no CUDA backend; use cpu");
  }
  if (arguments.device != "auto" && arguments.device != "cpu") {
    fail_usage("--device", "must be auto, cpu or cuda, but is \"{}\"", arguments.device);
  }
  if (arguments.threads < 0 || arguments.threads > 1024) {
    fail_usage("--threads", "must be 0 (all) to 1024, but is {}", arguments.threads);
  }
}

int64_t physical_memory() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
}

// The limit of this process's control group (version 2), or 0.
int64_t group_limit() {
  try {
    return std::stoll(read_file("/sys/fs/cgroup/memory.max"));
  } catch (const std::exception&) {  // no such file, or "max"
    return 0;
  }
}

}  // namespace

DeviceArguments device_arguments(const loop::RunSection& run) {
  return {.device = run.device,
          .threads = static_cast<int>(run.threads),
          .cpu_isa = run.cpu_isa,
          .memory_limit = run.device_memory_limit};
}

cpu::Isa cpu_isa(const DeviceArguments& arguments) {
  check_device(arguments);
  return cpu::parse_isa(arguments.cpu_isa);
}

int64_t memory_limit(const DeviceArguments& arguments) {
  if (arguments.memory_limit > 0) return arguments.memory_limit;
  const int64_t physical = std::max<int64_t>(0, physical_memory());
  const int64_t group = group_limit();
  return group > 0 && physical > 0 ? std::min(physical, group) : std::max(physical, group);
}

std::unique_ptr<ops::Backend> make_backend(const DeviceArguments& arguments) {
  const cpu::Isa isa = cpu_isa(arguments);
  return cpu::make_cpu_backend({.num_threads = arguments.threads,
                                .isa = isa,
                                .memory_limit_bytes = memory_limit(arguments)});
}

std::string describe_device(const DeviceArguments& arguments) {
  const cpu::Isa isa = cpu_isa(arguments);
  const std::string why =
      arguments.cpu_isa == "auto"
          ? "the best this processor offers"
          : fmt::format("asked for; the processor offers {}", cpu::isa_name(cpu::best_isa()));
  std::string text;
  text += "device:           cpu (this build has no CUDA backend)\n";
  text += fmt::format("instruction set:  {} ({})\n", cpu::isa_name(isa), why);
  text += fmt::format("threads:          {}{}\n", ThreadPool(arguments.threads).num_threads(),
                      arguments.threads == 0 ? " (all this process may use)" : "");
  text += fmt::format("memory limit:     {}{}\n", format_bytes(memory_limit(arguments)),
                      arguments.memory_limit == 0 ? " (what the machine has)" : "");
  return text;
}

}  // namespace octet::app
