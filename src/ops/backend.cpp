#include "ops/backend.h"

#include <chrono>

namespace octet::ops {

using tensor::Shape;
using tensor::TensorView;

double Backend::time_seconds(const std::function<void()>& body, int repeats) {
  synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) body();
  synchronize();
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return passed.count() / repeats;
}

void Backend::attention_inputs(const AttentionInputsArgs& args) {
  const int64_t q_width = args.q_out.row_elements(), k_width = args.k_out.row_elements();
  TensorView q = args.qkv.slice_columns(0, q_width).reshaped(args.q_out.shape);
  TensorView k = args.qkv.slice_columns(q_width, k_width).reshaped(args.k_out.shape);
  const TensorView v =
      args.qkv.slice_columns(q_width + k_width, k_width).reshaped(args.k_out.shape);
  if (!args.q_norm.empty()) {
    rms_norm({.x = q, .weight = args.q_norm, .y = args.q_out, .eps = args.eps});
    rms_norm({.x = k, .weight = args.k_norm, .y = args.k_out, .eps = args.eps});
    q = args.q_out;
    k = args.k_out;
  }
  rope({.x = q, .positions = args.positions, .table = args.rope_table, .y = args.q_out});
  rope({.x = k, .positions = args.positions, .table = args.rope_table, .y = args.k_out});
  kv_append({args.k_out, v, args.slots, args.cache});
}

void Backend::run_recorded(std::unique_ptr<Recording>&, const std::function<void()>& body) {
  body();
}

void Backend::quantize_output(const TensorView& dense, const QuantizedOutput& output) {
  if (output.empty()) return;
  quantize({.x = dense.reshaped(output.out.codes.shape),
            .column_scale = {},
            .out = output.out,
            .scale_format = output.scale_format});
}

}  // namespace octet::ops
