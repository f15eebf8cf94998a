#include "train/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace octet::train {

Schedule parse_schedule(std::string_view name) {
  if (name == "linear") return Schedule::kLinear;
  if (name == "cosine") return Schedule::kCosine;
  if (name == "constant") return Schedule::kConstant;
  if (name == "constant_with_warmup") return Schedule::kConstantWithWarmup;
  fail_usage("optim.lr_scheduler_type",
             "must be linear, cosine, constant or constant_with_warmup, but is \"{}\"", name);
}

double learning_rate(Schedule schedule, double peak, int64_t warmup, int64_t num_updates,
                     int64_t update) {
  if (schedule == Schedule::kConstant) return peak;
  if (update < warmup) return peak * static_cast<double>(update) / static_cast<double>(warmup);
  if (schedule == Schedule::kConstantWithWarmup) return peak;
  const double span = std::max<double>(1.0, static_cast<double>(num_updates - warmup));
  const double progress = std::min(1.0, static_cast<double>(update - warmup) / span);
  if (schedule == Schedule::kLinear) return peak * (1.0 - progress);
  return peak * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace octet::train
