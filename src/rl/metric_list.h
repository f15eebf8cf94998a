// Metrics by name, in the order they are reported. What nobody computed is absent, not 0.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace octet::rl {

using MetricList = std::vector<std::pair<std::string, double>>;

}  // namespace octet::rl
