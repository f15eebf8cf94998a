// The factors of one AdamW update that do not depend on the element, computed in F64 and rounded
// once: every backend takes them from here, so that all mean the same update.
#pragma once

#include <cmath>

#include "ops/optimizer.h"

namespace octet::ops {

struct AdamWFactors {
  float decay;  // lr · weight_decay
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float step_size;           // lr / (1 − β1^step)
  float second_moment_root;  // 1 / √(1 − β2^step)
  float eps, gradient_scale;
};

inline AdamWFactors adamw_factors(const AdamWArgs& args) {
  const auto step = static_cast<double>(args.step);
  const double beta1 = args.beta1, beta2 = args.beta2, learning_rate = args.learning_rate;
  return {.decay = static_cast<float>(learning_rate * args.weight_decay),
          .beta1 = args.beta1,
          .one_minus_beta1 = static_cast<float>(1 - beta1),
          .beta2 = args.beta2,
          .one_minus_beta2 = static_cast<float>(1 - beta2),
          .step_size = static_cast<float>(learning_rate / (1 - std::pow(beta1, step))),
          .second_moment_root = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, step))),
          .eps = args.eps,
          .gradient_scale = args.gradient_scale};
}

}  // namespace octet::ops
