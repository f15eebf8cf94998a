#include "io/fp8_linear.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "base/error.h"
#include "tensor/codec.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::Shape;
using tensor::TensorView;

std::vector<float> read_scales(const Checkpoint& checkpoint, const std::string& name,
                               const TensorView& view) {
  std::vector<float> scales(static_cast<size_t>(view.num_elements()));
  for (size_t i = 0; i < scales.size(); ++i) {
    switch (view.dtype) {
      case DType::kF32:
        scales[i] = view.as<float>()[i];
        break;
      case DType::kBF16:
        scales[i] = tensor::decode_bf16(view.as<uint16_t>()[i]);
        break;
      case DType::kF16:
        scales[i] = tensor::decode_f16(view.as<uint16_t>()[i]);
        break;
      default:
        fail(checkpoint.path(), "tensor \"{}\" must be F32, BF16 or F16, but is {}", name,
             tensor::dtype_name(view.dtype));
    }
    if (!(std::isfinite(scales[i]) && scales[i] > 0)) {
      fail(checkpoint.path(),
           "tensor \"{}\": every scale must be finite and above 0, but one is {}", name, scales[i]);
    }
  }
  return scales;
}

Granularity granularity_of(const Checkpoint& checkpoint, const std::string& name,
                           const Shape& scales, int64_t rows, int64_t columns) {
  if (scales.num_elements() == 1) return Granularity::kTensor;
  if (scales == Shape{rows} || scales == Shape{rows, 1}) return Granularity::kRow;
  if (scales == tensor::scale_shape(Granularity::kBlock, rows, columns)) return Granularity::kBlock;
  fail(checkpoint.path(),
       "tensor \"{}\" must have one scale, one per row ([{}, 1]) or one per 128 x 128 block ({}), "
       "but has the shape {}",
       name, rows, tensor::scale_shape(Granularity::kBlock, rows, columns).to_string(),
       scales.to_string());
}

}  // namespace

bool is_fp8_linear(const Checkpoint& checkpoint, std::string_view module) {
  const std::string name = fmt::format("{}.weight", module);
  return checkpoint.has(name) && checkpoint.peek(name).dtype == DType::kE4M3;
}

Fp8Linear read_fp8_linear(Checkpoint& checkpoint, std::string_view module) {
  const std::string weight_name = fmt::format("{}.weight", module);
  Fp8Linear linear;
  linear.codes = checkpoint.view(weight_name);
  if (linear.codes.dtype != DType::kE4M3 || linear.codes.shape.rank() != 2) {
    fail(checkpoint.path(), "tensor \"{}\" must be an F8_E4M3 matrix, but is {} {}", weight_name,
         tensor::dtype_name(linear.codes.dtype), linear.codes.shape.to_string());
  }
  const auto* codes = linear.codes.as<uint8_t>();
  const auto* end = codes + linear.codes.num_elements();
  if (const auto* nan = std::find_if(codes, end, [](uint8_t c) { return (c & 0x7F) == 0x7F; });
      nan != end) {
    fail(checkpoint.path(),
         "tensor \"{}\": weights must be finite, but element {} is NaN; the checkpoint is damaged",
         weight_name, nan - codes);
  }
  std::string scale_name = fmt::format("{}.weight_scale", module);
  if (!checkpoint.has(scale_name)) scale_name += "_inv";
  if (!checkpoint.has(scale_name)) {
    fail(checkpoint.path(),
         "tensor \"{}\" holds FP8 codes and needs \"{}.weight_scale\" or \"{}\", but neither is "
         "there",
         weight_name, module, scale_name);
  }
  const TensorView scales = checkpoint.view(scale_name);
  linear.granularity = granularity_of(checkpoint, scale_name, scales.shape, linear.codes.shape[0],
                                      linear.codes.shape[1]);
  linear.scales = read_scales(checkpoint, scale_name, scales);
  if (const std::string name = fmt::format("{}.input_scale", module); checkpoint.has(name)) {
    const std::vector<float> input = read_scales(checkpoint, name, checkpoint.view(name));
    if (input.size() != 1) {
      fail(checkpoint.path(), "tensor \"{}\" must have one value, but has {}", name, input.size());
    }
    linear.input_scale = input[0];
  }
  return linear;
}

}  // namespace octet::io
