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

// Where the ops run, and why there.
struct Choice {
  int cuda_device = -1;  // −1: the CPU
  std::string device_name;
  std::string why;
};

// The index of "cuda" or "cuda:N", or −1.
int cuda_index(const std::string& device) {
  if (device == "cuda") return 0;
  if (!device.starts_with("cuda:") || device.size() < 6 || device.size() > 7) return -1;
  int index = 0;
  for (const char c : device.substr(5)) {
    if (c < '0' || c > '9') return -1;
    index = 10 * index + (c - '0');
  }
  return index;
}

// Device `index` (−1: the first usable one) where this build and the machine have it.
Choice find_cuda(int index) {
#ifdef OCTET_CUDA
  std::string why_none;
  for (const cuda::DeviceInfo& device : cuda::devices(why_none)) {
    if (index >= 0 && device.index != index) continue;
    if (device.usable) return {device.index, device.name, {}};
    why_none = fmt::format("cuda:{}: {}", device.index, device.why_not);
  }
  if (why_none.empty()) why_none = fmt::format("there is no device cuda:{}", index);
  return {-1, {}, why_none};
#else
  (void)index;
  return {-1, {}, "this build has no CUDA backend"};
#endif
}

Choice choose(const DeviceArguments& arguments) {
  if (arguments.threads < 0 || arguments.threads > 1024) {
    fail_usage("--threads", "must be 0 (all) to 1024, but is {}", arguments.threads);
  }
  if (arguments.device == "cpu") return {-1, {}, "asked for"};
  if (arguments.device == "auto") {
    Choice choice = find_cuda(-1);
    if (choice.cuda_device >= 0) choice.why = "the machine has it";
    return choice;
  }
  const int index = cuda_index(arguments.device);
  if (index < 0) {
    fail_usage("--device", "must be auto, cpu, cuda or cuda:N, but is \"{}\"", arguments.device);
  }
  Choice choice = find_cuda(index);
  if (choice.cuda_device < 0) fail_usage("--device", "{}; use cpu", choice.why);
  choice.why = "asked for";
  return choice;
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

bool uses_cuda(const DeviceArguments& arguments) { return choose(arguments).cuda_device >= 0; }

#ifdef OCTET_CUDA
cuda::CudaOptions cuda_options(const DeviceArguments& arguments) {
  const Choice choice = choose(arguments);
  if (choice.cuda_device < 0) fail_usage("--device", "must be a CUDA device: {}", choice.why);
  return {.device = choice.cuda_device,
          .memory_limit_bytes = memory_limit(arguments),
          .inexact_products = arguments.inexact_products};
}
#endif

cpu::Isa cpu_isa(const DeviceArguments& arguments) {
  choose(arguments);
  return cpu::parse_isa(arguments.cpu_isa);
}

int64_t memory_limit(const DeviceArguments& arguments) {
  if (arguments.memory_limit > 0) return arguments.memory_limit;
#ifdef OCTET_CUDA
  if (const Choice choice = choose(arguments); choice.cuda_device >= 0) {
    return cuda::free_bytes(choice.cuda_device) / 100 * 98;  // code and recordings aside
  }
#endif
  const int64_t physical = std::max<int64_t>(0, physical_memory());
  const int64_t group = group_limit();
  return group > 0 && physical > 0 ? std::min(physical, group) : std::max(physical, group);
}

std::unique_ptr<ops::Backend> make_backend(const DeviceArguments& arguments) {
  const cpu::Isa isa = cpu_isa(arguments);
#ifdef OCTET_CUDA
  if (uses_cuda(arguments)) {
    return cuda::make_cuda_backend(cuda_options(arguments));
  }
#endif
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
  const Choice choice = choose(arguments);
  std::string text;
  if (choice.cuda_device >= 0) {
    text += fmt::format("device:           cuda:{} ({}; {})\n", choice.cuda_device,
                        choice.device_name, choice.why);
#ifdef OCTET_CUDA
    text += fmt::format("libraries:        {}\n{}", cuda::describe_libraries(),
                        cuda::describe_choices());
#endif
    text += fmt::format("memory limit:     {}{}\n", format_bytes(memory_limit(arguments)),
                        arguments.memory_limit == 0 ? " (what is free)" : "");
    return text;
  }
  text += fmt::format("device:           cpu ({})\n", choice.why);
  text += fmt::format("instruction set:  {} ({})\n", cpu::isa_name(isa), why);
  text += fmt::format("threads:          {}{}\n", ThreadPool(arguments.threads).num_threads(),
                      arguments.threads == 0 ? " (all this process may use)" : "");
  text += fmt::format("memory limit:     {}{}\n", format_bytes(memory_limit(arguments)),
                      arguments.memory_limit == 0 ? " (what the machine has)" : "");
  return text;
}

}  // namespace octet::app
