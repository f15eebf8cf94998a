// Learning-rate schedules, under Hugging Face's names.
#pragma once

#include <cstdint>
#include <string_view>

namespace octet::train {

enum class Schedule { kLinear, kCosine, kConstant, kConstantWithWarmup };

Schedule parse_schedule(std::string_view name);  // UsageError naming the allowed words

// The rate of update `update` (from 0) of `num_updates`: rises linearly over the first `warmup`
// updates (not with kConstant), then falls linearly or along half a cosine to 0 at `num_updates`.
double learning_rate(Schedule schedule, double peak, int64_t warmup, int64_t num_updates,
                     int64_t update);

}  // namespace octet::train
