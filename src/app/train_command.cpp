#include <algorithm>
#include <cstdio>
#include <string>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/commands.h"
#include "app/output.h"
#include "io/model_config.h"
#include "loop/train_run.h"
#include "observe/metrics.h"
#include "observe/plot.h"
#include "observe/progress.h"

namespace octet::app {
namespace {

void print_curve(const std::string& dir, const std::string& metric, int columns) {
  observe::MetricCurve curve = observe::read_metric(dir + "/metrics.jsonl", metric);
  if (curve.values.size() < 2) return;
  const int window = std::max<int>(1, static_cast<int>(curve.values.size()) / 30);
  curve.values = observe::moving_average(curve.values, window);
  print(fmt::format("\n{}", observe::plot_curve(curve, {.title = metric,
                                                        .x_label = "step",
                                                        .columns = columns,
                                                        .rows = 10,
                                                        .unicode = observe::locale_is_utf8()})));
}

// As a shell reads it back.
std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=-+:,@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string quoted(1, '\'');
  for (const char c : text) {
    if (c == '\'') quoted.append("'\\'");
    quoted.push_back(c);
  }
  quoted.push_back('\'');
  return quoted;
}

// What generate needs to compute as the run did, where its own choice may be another.
std::string precision_flags(const loop::TrainConfig& config, const loop::RunResult& result) {
  std::string flags;
  if (config.is_fp8()) {
    flags = fmt::format(" --flow {} --load-in-fp8 {}", config.precision.flow, result.load_in_fp8);
  } else if (config.lora && io::read_model_config(config.model.path).quantization) {
    flags = " --flow bf16";
  }
  if (config.model.kv_cache_dtype == "fp8") flags += " --kv-cache-dtype fp8";
  return flags;
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  const loop::TrainConfig config = loop::read_config(arguments.config, arguments.overrides);
  const DeviceArguments device = device_arguments(config.run);
  const auto backend = make_backend(device);

  loop::RunOptions options;
  options.resume = arguments.resume;
  options.memory_limit = memory_limit(device);
  options.terminal = observe::stderr_is_terminal();
  options.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  const loop::RunResult result = loop::run_training(*backend, config, options);
  if (result.interrupted) {
    std::string command = fmt::format("octet train {}", shell_word(arguments.config));
    for (const std::string& entry : arguments.overrides) {
      command.append(" ").append(shell_word(entry));
    }
    fmt::print(stderr, "stopped after step {}; continue with: {} --resume\n", result.steps_done,
               command);
    return 1;
  }
  const int columns = std::clamp(observe::stderr_columns(), 40, 100);
  print_curve(result.dir, config.is_rl() ? "reward" : "loss", columns);
  if (config.is_rl() && config.clip.mode == "calibrated") {
    print_curve(result.dir, "calibration/low", columns);
    print_curve(result.dir, "calibration/high", columns);
  }
  const bool lora = config.lora.has_value();
  const bool completions = config.is_rl() && config.train.log_completions_steps > 0;
  print(fmt::format("\nresults: {}/ (metrics.jsonl, events.jsonl, {}checkpoints/)\n{}: {}\n",
                    result.dir, completions ? "completions/, " : "", lora ? "adapter" : "model",
                    result.export_dir));
  const std::string folder = shell_word(result.export_dir);
  print(fmt::format(
      "next:    octet generate --model {}{} \"{}\"\n",
      lora ? fmt::format("{} --adapter {}", shell_word(config.model.path), folder) : folder,
      precision_flags(config, result), config.data.task.empty() ? "…" : "47+85="));
  return 0;
}

}  // namespace octet::app
