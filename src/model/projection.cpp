#include "model/projection.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace octet::model {

using tensor::DType;
using tensor::QuantizedView;
using tensor::TensorView;

Projector::Projector(tensor::Allocator& allocator, const Model& model, bool shadow)
    : model_(model) {
  if (shadow && model.precision().fp8()) {
    shadow_buffer_ = allocator.allocate(DType::kBF16, {model.max_group_weight_elements()},
                                        "BF16 reference weights");
  }
}

ops::QuantizedOutput Projector::input_of(std::span<const LinearLayer> group, int64_t num_tokens,
                                         const Activations& scratch,
                                         const ForwardMode& mode) const {
  const Precision& precision = model_.precision();
  if (!precision.fp8() || mode.shadow) return {};
  const int64_t width = group[0].weight->shape[1];
  const tensor::Granularity granularity = precision.activation_granularity();
  const bool adapted = mode.adapters && std::ranges::any_of(group, [](const LinearLayer& layer) {
                         return !layer.lora.empty();
                       });
  return {.out = {TensorView(scratch.codes.data, DType::kE4M3, {num_tokens, width}),
                  TensorView(scratch.scales.data, DType::kF32,
                             tensor::scale_shape(granularity, num_tokens, width)),
                  granularity},
          .scale_format = precision.scale_format,
          .keep_dense = mode.save || adapted};
}

void Projector::forward(ops::Backend& backend, std::span<const LinearLayer> group,
                        const TensorView& x, const ops::QuantizedOutput& input, const TensorView& y,
                        std::span<const TensorView> lora, const ForwardMode& mode) const {
  const Precision& precision = model_.precision();
  const QuantizedView& xq = input.out;
  std::vector<ops::Weight> weights;
  if (!xq.empty()) {
    for (const LinearLayer& layer : group) weights.push_back(layer.weight->forward_weight());
  } else if (precision.fp8()) {
    OCTET_ASSERT(!shadow_buffer_.empty());
    auto* next = static_cast<uint16_t*>(shadow_buffer_.data());
    for (const LinearLayer& layer : group) {
      const Parameter& weight = *layer.weight;
      const TensorView dense(next, DType::kBF16, weight.shape);
      next += dense.num_elements();
      if (weight.master.empty()) {
        backend.dequantize({weight.quantized, dense});
      } else {
        backend.convert(weight.master, dense);
      }
      weights.push_back({dense, {}});
    }
  } else {
    for (const LinearLayer& layer : group) weights.push_back(layer.weight->forward_weight());
  }

  // Biases are separate tensors, so a group that has one is multiplied part by part.
  const bool split = group[0].bias != nullptr;
  int64_t column = 0;
  for (size_t part = 0; part < group.size(); ++part) {
    const int64_t rows = weights[part].rows();
    if (split || part == 0) {
      backend.linear({.x = xq.empty() ? x : TensorView(),
                      .xq = xq,
                      .weights = split ? std::span(weights).subspan(part, 1) : std::span(weights),
                      .bias = split ? group[part].bias->dense : TensorView(),
                      .y = split ? y.slice_columns(column, rows) : y,
                      .settled = !mode.shadow});
    }
    column += rows;
  }

  if (!mode.adapters) return;
  std::vector<ops::Weight> a_weights;
  TensorView all_lora;  // of the adapters that there are, side by side
  for (size_t part = 0; part < group.size(); ++part) {
    if (group[part].lora.empty()) continue;
    a_weights.push_back(group[part].lora.a->forward_weight());
    if (all_lora.empty()) all_lora = lora[part];
  }
  if (a_weights.empty()) return;
  all_lora.shape = {x.shape[0], all_lora.row_stride};
  backend.linear({.x = x,
                  .xq = {},
                  .weights = a_weights,
                  .bias = {},
                  .y = all_lora,
                  .settled = true,
                  .x_settled = true});
  const LoraPair& first = group[0].lora;
  const bool alike = std::ranges::all_of(group, [&](const LinearLayer& layer) {
    return !layer.lora.empty() && layer.lora.rank() == first.rank() &&
           layer.lora.scale == first.scale;
  });
  if (alike) {
    std::vector<ops::Weight> b_weights;
    for (const LinearLayer& layer : group) b_weights.push_back(layer.lora.b->forward_weight());
    backend.linear({.x = all_lora,
                    .xq = {},
                    .weights = b_weights,
                    .bias = {},
                    .y = y,
                    .alpha = first.scale,
                    .accumulate = true,
                    .x_per_weight = true,
                    .settled = true});
    return;
  }
  column = 0;
  for (size_t part = 0; part < group.size(); ++part) {
    const int64_t rows = weights[part].rows();
    if (const LoraPair& pair = group[part].lora; !pair.empty()) {
      const ops::Weight b = pair.b->forward_weight();
      backend.linear({.x = lora[part],
                      .xq = {},
                      .weights = {&b, 1},
                      .bias = {},
                      .y = y.slice_columns(column, rows),
                      .alpha = pair.scale,
                      .accumulate = true,
                      .settled = true});
    }
    column += rows;
  }
}

void Projector::backward(ops::Backend& backend, std::span<const LinearLayer> group,
                         const TensorView& dy, const TensorView& x,
                         std::span<const TensorView> lora, const TensorView& dx,
                         std::span<const int32_t> sequence_offsets,
                         const Activations& scratch) const {
  const Precision& precision = model_.precision();
  std::vector<ops::Weight> weights;
  for (const LinearLayer& layer : group) weights.push_back(layer.weight->weight());
  backend.linear_input_grad({.dy = dy,
                             .weights = weights,
                             .dx = dx,
                             .dequantize = precision.dequantize_backward,
                             .gradient_format = precision.gradient_format,
                             .scale_format = precision.scale_format});
  int64_t column = 0;
  for (size_t part = 0; part < group.size(); ++part) {
    const LinearLayer& layer = group[part];
    const TensorView dy_part = dy.slice_columns(column, weights[part].rows());
    column += weights[part].rows();
    if (layer.weight->trained) {
      backend.linear_weight_grad({.dy = dy_part,
                                  .x = x,
                                  .dw = layer.weight->gradient,
                                  .dbias = layer.bias ? layer.bias->gradient : TensorView(),
                                  .sequence_offsets = sequence_offsets,
                                  .quantize = precision.fp8(),
                                  .gradient_format = precision.gradient_format,
                                  .scale_format = precision.scale_format});
    }
    if (const LoraPair& pair = layer.lora; !pair.empty() && pair.a->trained) {
      const ops::Weight a = pair.a->forward_weight();
      const ops::Weight b = pair.b->forward_weight();
      const TensorView d_lora(scratch.d_lora.data, x.dtype, {x.shape[0], pair.rank()});
      backend.linear_input_grad(
          {.dy = dy_part, .weights = {&b, 1}, .dx = d_lora, .alpha = pair.scale});
      backend.linear_weight_grad({.dy = dy_part,
                                  .x = lora[part],
                                  .dw = pair.b->gradient,
                                  .dbias = {},
                                  .alpha = pair.scale,
                                  .sequence_offsets = sequence_offsets});
      backend.linear_weight_grad({.dy = d_lora,
                                  .x = x,
                                  .dw = pair.a->gradient,
                                  .dbias = {},
                                  .sequence_offsets = sequence_offsets});
      backend.linear_input_grad({.dy = d_lora, .weights = {&a, 1}, .dx = dx, .accumulate = true});
    }
  }
}

}  // namespace octet::model
