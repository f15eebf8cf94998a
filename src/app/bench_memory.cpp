#include "app/bench_memory.h"

#include <fmt/format.h>

#include "app/random_weights.h"
#include "base/strings.h"
#include "rollout/engine.h"

namespace octet::app {
namespace {

struct Memory {
  int64_t allocated = 0, device = 0;  // bytes in use
  bool operator==(const Memory&) const = default;
};

Memory memory_of(ops::Backend& backend) {
  backend.synchronize();
  return {backend.allocator().bytes_in_use(), backend.device_bytes_in_use()};
}

void repeat_calls(ops::Backend& backend, int64_t count, const std::function<bool()>& again,
                  MemoryVerdict& verdict) {
  const Memory first = memory_of(backend);
  Memory last = first;
  bool equal = true, grown = false;
  for (int64_t call = 2; call <= count; ++call) {
    equal = again() && equal;
    const Memory memory = memory_of(backend);
    if (memory != last) {
      verdict.text += fmt::format("  rollout {}: allocated {}, device {}\n", call, memory.allocated,
                                  memory.device);
    }
    grown = grown || memory != last;
    last = memory;
  }
  const bool good = equal && !grown;
  verdict.text += fmt::format(
      "  {} rollouts: allocated {} after the first, growth {}; device {}, growth {}; "
      "outputs {}: {}\n",
      count, first.allocated, last.allocated - first.allocated, first.device,
      last.device - first.device, equal ? "all equal" : "DIFFER", good ? "good" : "BAD");
  verdict.good = verdict.good && good;
}

void remap_pool(ops::Backend& backend, loop::Policy& policy, const std::function<bool()>& again,
                MemoryVerdict& verdict) {
  const Memory with = memory_of(backend);
  policy.unmap_pages();
  const Memory without = memory_of(backend);
  policy.map_pages();
  const bool equal = again();
  const Memory after = memory_of(backend);
  const bool good = equal && after == with;
  verdict.text += fmt::format(
      "  pool unmapped: allocated {} to {}, device {} to {}; mapped again: {} and {}; next output "
      "{}: {}\n",
      format_bytes(with.allocated), format_bytes(without.allocated), format_bytes(with.device),
      format_bytes(without.device), format_bytes(after.allocated), format_bytes(after.device),
      equal ? "equal" : "DIFFERS", good ? "good" : "BAD");
  verdict.good = verdict.good && good;
}

// In per cent, with its sign but where it rounds to 0.
std::string percent_off(int64_t measured, int64_t planned) {
  const double percent = 100.0 * (static_cast<double>(measured) / static_cast<double>(planned) - 1);
  const std::string text = fmt::format("{:+.2f}", percent);
  return text.substr(1) == "0.00" ? text.substr(1) : text;
}

}  // namespace

std::vector<loop::PlanEntry> plan_rollout(ops::Backend& backend, const io::ModelConfig& config,
                                          const loop::PolicyOptions& options) {
  std::vector<loop::PlanEntry> plan =
      loop::plan_memory(config, config.vocab_size, options, &backend);
  tensor::PlanningAllocator allocator;
  loop::Policy policy(allocator, config, config.vocab_size, options);
  plan.push_back({"sampling", rollout::Engine::num_bytes(policy.decoder(), policy.head())});
  // The weights are filled before there are workspaces.
  const int64_t later =
      loop::plan_total(loop::plan_workspaces(backend, loop::workspace_shape(policy, options)));
  const int64_t filling = random_weights_bytes(policy.model());
  if (filling > later) plan.push_back({"filling", filling - later});
  return plan;
}

MemoryVerdict check_memory(ops::Backend& backend, loop::Policy& policy,
                           const std::vector<loop::PlanEntry>& plan, const MemoryChecks& checks,
                           const std::function<bool()>& again) {
  MemoryVerdict verdict;
  if (checks.repeat > 1) repeat_calls(backend, checks.repeat, again, verdict);
  if (checks.remap) remap_pool(backend, policy, again, verdict);
  const int64_t planned = loop::plan_total(plan);
  const int64_t peak = backend.allocator().peak_bytes(), device_peak = backend.device_peak_bytes();
  verdict.text +=
      fmt::format("  memory plan:\n{}  peak: allocator {} ({} % of the plan), device {} ({} %)",
                  loop::format_plan(plan), format_bytes(peak), percent_off(peak, planned),
                  format_bytes(device_peak), percent_off(device_peak, planned));
  return verdict;
}

}  // namespace octet::app
