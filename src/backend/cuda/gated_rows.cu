// The gated activation of BF16 rows with the quantiser after it: what it gives stays in registers.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/gate.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/fused.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/quantized_rows.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;

struct GatedRows {
  const Bf16* gate_up;
  int64_t in_stride;
  Bf16* out;  // may be null
  int64_t out_stride;
  int width;
  bool gelu;
  QuantizedRows quantized;
};

// The blocks of one x take a row, a thread kVectors times eight elements of it; registers are few
// enough for several rows of 12,288 to a multiprocessor.
template <RowScales kScales, int kVectors>
__global__ void __maxnreg__(24 + 8 * kVectors) gated_rows_kernel(const GatedRows args) {
  invite_successor();
  await_predecessor();
  const int64_t row = blockIdx.x;
  const int step = 8 * static_cast<int>(blockDim.x);
  const int first =
      static_cast<int>(blockIdx.y) * kVectors * step + 8 * static_cast<int>(threadIdx.x);
  const Bf16* in = args.gate_up + row * args.in_stride;
  uint4 gates[kVectors], ups[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * step;
    gates[v] = ups[v] = make_uint4(0, 0, 0, 0);
    if (column >= args.width) continue;
    gates[v] = load8(in + column);
    ups[v] = load8(in + args.width + column);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float gate[8], up[8];
    unpack8(gates[v], gate);
    unpack8(ups[v], up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = active(gate[i], args.gelu) * up[i];
    gates[v] = pack8(gate);
    const int column = first + v * step;
    if (args.out != nullptr && column < args.width) {
      store8(gates[v], args.out + row * args.out_stride + column);
    }
  }
  if constexpr (kScales != RowScales::kNone) {
    quantize_row<false, kScales, true>(gates, row, first, args.width, args.quantized);
  }
}

template <RowScales kScales>
auto kernel_of(int per_thread) {
  return per_thread == 1   ? gated_rows_kernel<kScales, 1>
         : per_thread == 2 ? gated_rows_kernel<kScales, 2>
                           : gated_rows_kernel<kScales, 4>;
}

}  // namespace

bool fused_gated_activation(Context& context, const ops::GatedActivationArgs& args) {
  const bool quantizes = !args.quantized.empty();
  if (args.out.shape.rank() != 2) return false;
  const int64_t num_rows = args.out.shape[0], width = args.out.shape[1];
  if (args.out.dtype != DType::kBF16 || args.gate_up.dtype != DType::kBF16 ||
      !(args.gate_up.shape == Shape{num_rows, 2 * width}) || args.gate_up.data == nullptr ||
      args.out.data == nullptr || !takes_vectors(args.gate_up, width, 8) ||
      !takes_vectors(args.out, width, 8) || num_rows * width == 0 || width > kWidestRow ||
      !takes_quantized(args.quantized, num_rows, width)) {
    return false;
  }
  const QuantizedRows quantized = quantized_rows(context, args.quantized);
  const RowShares shares =
      shares_of(context, num_rows, width, quantized.kind == RowScales::kPerRow);
  const auto kernel =
      quantized.kind == RowScales::kNone     ? kernel_of<RowScales::kNone>(shares.per_thread)
      : quantized.kind == RowScales::kPerRow ? kernel_of<RowScales::kPerRow>(shares.per_thread)
                                             : kernel_of<RowScales::kPerBlock>(shares.per_thread);
  const bool writes_out = !quantizes || args.quantized.keep_dense;
  launch("gated_activation", context, shares.launch, kernel,
         GatedRows{.gate_up = args.gate_up.as<Bf16>(),
                   .in_stride = args.gate_up.row_stride,
                   .out = writes_out ? args.out.as<Bf16>() : nullptr,
                   .out_stride = args.out.row_stride,
                   .width = static_cast<int>(width),
                   .gelu = args.activation == ops::Activation::kGeluTanh,
                   .quantized = quantized});
  return true;
}

}  // namespace octet::cuda
