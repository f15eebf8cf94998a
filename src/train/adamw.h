// AdamW over all trained parameters of a weight store: clipping by the global norm, the update, and
// the rebuilding of what the forward reads. A step happens whole or leaves no trace.
#pragma once

#include <vector>

#include "model/weight_store.h"

namespace octet::train {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;   // of matrices only: norms and biases do not decay
  double max_grad_norm = 0;  // 0: no clipping
};

struct UpdateResult {
  bool applied = false;    // false: a gradient or its square was not finite, nothing changed
  double grad_norm = 0;    // before clipping; NaN where not applied
  int64_t non_finite = 0;  // gradient elements
};

class AdamW {
 public:
  // Allocates two F32 moments per trained parameter.
  AdamW(tensor::Allocator& allocator, model::WeightStore& weights, const AdamWOptions& options);

  void zero_gradients(ops::Backend& backend);
  // Takes one step from the accumulated gradients and refreshes the weight store.
  UpdateResult step(ops::Backend& backend, double learning_rate);

  struct Slot {
    model::Parameter* parameter = nullptr;
    tensor::TensorView first_moment, second_moment;
    tensor::Buffer first_buffer, second_buffer;
  };
  std::vector<Slot>& slots() { return slots_; }  // for checkpoints
  int64_t num_steps() const { return num_steps_; }
  void set_num_steps(int64_t steps) { num_steps_ = steps; }

 private:
  model::WeightStore& weights_;
  AdamWOptions options_;
  std::vector<Slot> slots_;
  int64_t num_steps_ = 0;
};

}  // namespace octet::train
