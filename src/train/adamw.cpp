#include "train/adamw.h"

#include <cmath>
#include <limits>

namespace octet::train {

AdamW::AdamW(tensor::Allocator& allocator, model::WeightStore& weights, const AdamWOptions& options)
    : weights_(weights), options_(options) {
  for (model::Parameter& parameter : weights.parameters()) {
    if (!parameter.trained) continue;
    Slot& slot = slots_.emplace_back();
    slot.parameter = &parameter;
    slot.first_buffer = allocator.allocate(tensor::DType::kF32, parameter.shape, "optimiser");
    slot.second_buffer = allocator.allocate(tensor::DType::kF32, parameter.shape, "optimiser");
    slot.first_moment = slot.first_buffer.view(tensor::DType::kF32, parameter.shape);
    slot.second_moment = slot.second_buffer.view(tensor::DType::kF32, parameter.shape);
  }
}

void AdamW::zero_gradients(ops::Backend& backend) {
  for (const Slot& slot : slots_) backend.fill_zero(slot.parameter->gradient);
}

UpdateResult AdamW::step(ops::Backend& backend, double learning_rate) {
  UpdateResult result;
  double sum = 0;
  for (const Slot& slot : slots_) {
    const ops::SquaredNorm norm = backend.squared_norm(slot.parameter->gradient);
    sum += norm.sum;
    result.non_finite += norm.non_finite;
  }
  result.grad_norm = std::sqrt(sum);
  double scale = 1.0;
  if (options_.max_grad_norm > 0) {
    scale = std::min(1.0, options_.max_grad_norm / (result.grad_norm + 1e-6));
  }
  // A square that F32 cannot hold would stay in the second moment for good.
  const bool holds = scale * scale * sum <= std::numeric_limits<float>::max();
  if (result.non_finite > 0 || !holds) {
    result.grad_norm = std::numeric_limits<double>::quiet_NaN();
    return result;
  }
  ++num_steps_;
  for (const Slot& slot : slots_) {
    const bool matrix = slot.parameter->shape.rank() > 1;
    backend.adamw({.master = slot.parameter->master,
                   .gradient = slot.parameter->gradient,
                   .first_moment = slot.first_moment,
                   .second_moment = slot.second_moment,
                   .learning_rate = static_cast<float>(learning_rate),
                   .beta1 = static_cast<float>(options_.beta1),
                   .beta2 = static_cast<float>(options_.beta2),
                   .eps = static_cast<float>(options_.epsilon),
                   .weight_decay = matrix ? static_cast<float>(options_.weight_decay) : 0.0f,
                   .gradient_scale = static_cast<float>(scale),
                   .step = num_steps_});
  }
  weights_.refresh(backend);
  result.applied = true;
  return result;
}

}  // namespace octet::train
