#include "model/lora.h"

#include <fmt/format.h>

namespace octet::model {

std::string lora_key(const std::string& module, bool b) {
  return fmt::format("base_model.model.{}.lora_{}.weight", module, b ? 'B' : 'A');
}

}  // namespace octet::model
