#include "model/lora.h"

#include <algorithm>

#include <fmt/format.h>

namespace octet::model {

bool lora_targets(const io::LoraConfig& config, std::string_view module_path) {
  const std::string_view last = module_path.substr(module_path.rfind('.') + 1);
  return config.target_modules.empty() ||
         std::any_of(config.target_modules.begin(), config.target_modules.end(),
                     [&](const std::string& name) { return name == last || name == module_path; });
}

std::string lora_key(const std::string& module, bool b) {
  return fmt::format("base_model.model.{}.lora_{}.weight", module, b ? 'B' : 'A');
}

}  // namespace octet::model
