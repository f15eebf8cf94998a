// Shapes of known models, for measuring without their weights.
#pragma once

#include <string>

#include "io/model_config.h"

namespace octet::app {

// UsageError naming the known shapes. `num_layers` > 0 takes that many of its layers
// and must be no more than it has.
io::ModelConfig shape_named(const std::string& name, int64_t num_layers);

}  // namespace octet::app
