// Groups of linear layers that read one input, with their quantisation and their adapters: what the
// decoder calls instead of bare products.
#pragma once

#include <span>

#include "model/activations.h"

namespace octet::model {

// How a forward is run.
struct ForwardMode {
  bool save = false;     // keep what the backward needs
  bool shadow = false;   // the BF16 reference: same weights, activations not quantised
  bool adapters = true;  // false: the base model
};

class Projector {
 public:
  // Scratch for the shadow pass's BF16 weights is allocated where `shadow` may be asked for.
  Projector(tensor::Allocator& allocator, const Model& model, bool shadow);

  // What the op that makes a group's input [T, K] must make of it: in the FP8 flows its codes, in
  // `scratch`, and the dense values only where something reads them.
  ops::QuantizedOutput input_of(std::span<const LinearLayer> group, int64_t num_tokens,
                                const Activations& scratch, const ForwardMode& mode) const;

  // y [T, ΣN] = x [T, K] of every layer of the group side by side, adapters added; x as `input_of`
  // asked for it. lora: the group's intermediate results, written.
  void forward(ops::Backend& backend, std::span<const LinearLayer> group,
               const tensor::TensorView& x, const ops::QuantizedOutput& input,
               const tensor::TensorView& y, std::span<const tensor::TensorView> lora,
               const ForwardMode& mode) const;

  // dx [T, K] from dy [T, ΣN]; adds the gradients of trained weights. x and lora as the forward had
  // them; sequence_offsets bounds the sequences of the tokens.
  void backward(ops::Backend& backend, std::span<const LinearLayer> group,
                const tensor::TensorView& dy, const tensor::TensorView& x,
                std::span<const tensor::TensorView> lora, const tensor::TensorView& dx,
                std::span<const int32_t> sequence_offsets, const Activations& scratch) const;

 private:
  const Model& model_;
  tensor::Buffer shadow_buffer_;
};

}  // namespace octet::model
