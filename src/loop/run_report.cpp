#include "loop/run_report.h"

#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace octet::loop {

std::string progress_note(const observe::MetricList& metrics, bool is_rl) {
  std::string text;
  for (const auto& [name, label] : {std::pair{"reward", "reward"},
                                    {"loss", "loss"},
                                    {"entropy", "entropy"},
                                    {"grad_norm", "grad"},
                                    {"calibration/low", "L"},
                                    {"calibration/high", "H"},
                                    {"eval/reward", "eval"},
                                    {"eval/loss", "eval loss"}}) {
    if (is_rl && std::string_view(name) == "loss") continue;
    for (const auto& [key, value] : metrics) {
      if (key == name) text += fmt::format("{}{} {:.3g}", text.empty() ? "" : "  ", label, value);
    }
  }
  return text;
}

std::vector<std::string> skipped_updates(const observe::MetricList& metrics) {
  std::vector<std::string> messages;
  for (const auto& [name, value] : metrics) {
    const bool non_finite = name == "skipped_updates/non_finite";
    if (!non_finite && name != "skipped_updates/no_tokens") continue;
    messages.push_back(fmt::format(
        "{} of the step's updates changed nothing: {}", value,
        non_finite ? "the loss or a gradient was not finite; a lower optim.learning_rate may help"
                   : "masks left no token to learn from"));
  }
  return messages;
}

}  // namespace octet::loop
