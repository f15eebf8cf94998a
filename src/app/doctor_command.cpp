#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <zlib.h>

#include "app/backend_choice.h"
#include "app/commands.h"
#include "app/output.h"
#include "base/error.h"
#include "io/fp8_linear.h"
#include "loop/data_source.h"
#include "loop/setup.h"

namespace octet::app {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = "";  // __VERSION__ names it
#else
constexpr const char* kCompiler = "GCC ";
#endif

std::string describe_build() {
  return fmt::format(
      "octet {}, built by {}{}\n"
      "libraries:        fmt {}.{}.{}, nlohmann-json {}.{}.{}, zlib {}\n",
      OCTET_VERSION, kCompiler, __VERSION__, FMT_VERSION / 10000, FMT_VERSION / 100 % 100,
      FMT_VERSION % 100, NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
      NLOHMANN_JSON_VERSION_PATCH, zlibVersion());
}

// Looks up every tensor that the model needs, with its shape and element type, and every one that
// it does not; the values stay unread. Returns one line per fault.
std::vector<std::string> check_tensors(const loop::TrainConfig& config,
                                       const io::ModelConfig& model_config) {
  tensor::PlanningAllocator allocator;
  model::Model model(allocator, model_config, loop::make_precision(config, model_config),
                     model::Training::kNone, std::nullopt);
  io::Checkpoint checkpoint(config.model.path);
  std::vector<std::string> faults;
  const auto check = [&](const auto& look) {
    try {
      look();
    } catch (const Error& error) {
      faults.push_back(error.what());
    }
  };
  for (const model::Parameter& parameter : model.weights().parameters()) {
    const std::string module = parameter.name.substr(0, parameter.name.rfind('.'));
    check([&] {
      const bool linear = parameter.kind == model::ParameterKind::kLinear;
      if (linear && io::is_fp8_linear(checkpoint, module)) {
        io::read_fp8_linear(checkpoint, module);
        return;
      }
      using tensor::DType;
      const DType dtype = checkpoint.view(parameter.name, parameter.shape).dtype;
      if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
        fail(parameter.name, "the tensor must be F32, BF16 or F16, but is {}",
             tensor::dtype_name(dtype));
      }
    });
  }
  if (model_config.tie_word_embeddings && checkpoint.has("lm_head.weight")) {
    checkpoint.mark_used("lm_head.weight");
  }
  check([&] { checkpoint.expect_all_used(); });
  print_line(fmt::format("tensors:          {} expected, {} fault(s)",
                         model.weights().parameters().size(), faults.size()));
  return faults;
}

void check_config(const DoctorArguments& arguments) {
  const loop::TrainConfig config = loop::read_config(arguments.config, arguments.overrides);
  const DeviceArguments device = device_arguments(config.run);
  print(describe_device(device));
  print(fmt::format("\n{}\n", loop::print_config(config)));

  const loop::ModelSource source = loop::read_model_source(config);
  if (config.model.init) {
    print_line("tensors:          made from a seed");
  } else if (const auto faults = check_tensors(config, source.config); !faults.empty()) {
    fail(config.model.path, "the checkpoint does not fit its config.json:\n  {}",
         fmt::join(faults, "\n  "));
  }
  loop::make_rewards(config);  // for their own checks
  const loop::DataSource data(config, source.text_side);
  print_line(fmt::format("data:             {} training rows, {} left out, {} for evaluation",
                         data.num_train(), data.num_left_out(), data.eval().size()));

  const int64_t limit = memory_limit(device);
  const int64_t num_known = source.text_side.num_known(source.config);
  const std::unique_ptr<ops::Backend> backend = make_backend(device);
  const loop::PolicyOptions options =
      loop::make_policy_options(config, source.config, num_known, limit, backend.get());
  const auto plan = loop::plan_training(config, source.config, num_known, options, backend.get());
  loop::check_plan(plan, limit, loop::plan_advice(options));
  print(fmt::format("memory plan:\n{}", loop::format_plan(plan)));
}

}  // namespace

int run_doctor(const DoctorArguments& arguments) {
  print(describe_build());
  if (arguments.config.empty()) {
    print(describe_device(arguments.device));
  } else {
    check_config(arguments);
  }
  return 0;
}

}  // namespace octet::app
