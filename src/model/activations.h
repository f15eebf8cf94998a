// Everything a forward and a backward write that is no weight and no KV page, allocated once.
// T tokens (at most max_tokens), H hidden, Q query heads × D, G key/value heads × D, I inner width.
#pragma once

#include <vector>

#include "model/model.h"

namespace octet::model {

// The seven projections of a layer, in the order of their adapters' intermediate results.
enum ProjectionIndex { kQ, kK, kV, kO, kGate, kUp, kDown, kNumProjections };

// What one layer's forward leaves for its backward.
struct LayerActivations {
  tensor::TensorView x;           // [T, H] residual stream into the layer
  tensor::TensorView normed;      // [T, H]
  tensor::TensorView qkv;         // [T, Q + 2 G] before norm and rotation
  tensor::TensorView q_rotated;   // [T, Q]
  tensor::TensorView attention;   // [T, Q]
  tensor::TensorView lse;         // [T, query heads] F32
  tensor::TensorView x_mid;       // [T, H] residual stream after attention
  tensor::TensorView mlp_normed;  // [T, H]
  tensor::TensorView gate_up;     // [T, 2 I]
  tensor::TensorView activated;   // [T, I]
  // [T, r] x Aᵀ, where there is an adapter; those of a group are the columns of one matrix.
  tensor::TensorView lora[kNumProjections];
};

class Activations {
 public:
  // With `training` one set per layer and the backward's scratch; otherwise the layers share one
  // set.
  Activations(tensor::Allocator& allocator, const Model& model, int64_t max_tokens, bool training);

  int64_t max_tokens() const { return max_tokens_; }
  bool training() const { return training_; }
  // The set of a layer, cut to the first `num_tokens` rows.
  LayerActivations layer(int64_t index, int64_t num_tokens) const;

  tensor::TensorView x_final;    // [T, H] residual stream after the last layer
  tensor::TensorView hidden;     // [T, H] after the final norm
  tensor::TensorView k_rotated;  // [T, G]
  tensor::TensorView branch;     // [T, H] a block's output before the residual add
  tensor::TensorView codes;      // [T, widest input] of a quantised input
  tensor::TensorView scales;     // flat F32, its scales

  // Backward.
  tensor::TensorView d_x;          // [T, H]
  tensor::TensorView d_normed;     // [T, H]
  tensor::TensorView d_activated;  // [T, I]
  tensor::TensorView d_gate_up;    // [T, 2 I]
  tensor::TensorView d_attention;  // [T, Q]
  tensor::TensorView d_q_rotated;  // [T, Q]
  tensor::TensorView d_k_rotated;  // [T, G]
  tensor::TensorView d_qkv;        // [T, Q + 2 G]
  tensor::TensorView d_lora;       // [T, r]

 private:
  tensor::TensorView make(tensor::DType dtype, tensor::Shape shape);

  tensor::Allocator& allocator_;
  const Model& model_;
  int64_t max_tokens_;
  bool training_;
  std::vector<tensor::Buffer> buffers_;
  std::vector<LayerActivations> layers_;
};

}  // namespace octet::model
