#include <algorithm>

#include "backend/cpu/codec_kernels.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/quantize_rows.h"
#include "base/error.h"

namespace octet::cpu {

using tensor::DType;

void convert(Context& context, const tensor::TensorView& from, const tensor::TensorView& to) {
  const auto convertible = [](DType dtype) {
    return dtype == DType::kF32 || dtype == DType::kBF16;
  };
  if (!convertible(from.dtype) || !convertible(to.dtype)) {
    fail("convert", "takes F32 and BF16, but was given {} and {}", tensor::dtype_name(from.dtype),
         tensor::dtype_name(to.dtype));
  }
  if (!(from.shape == to.shape)) {
    fail("convert", "both views must have one shape, but they have {} and {}",
         from.shape.to_string(), to.shape.to_string());
  }
  const CodecKernels& codec = codec_kernels(context.isa);
  // One row where both are contiguous, so that a vector or a narrow matrix goes in long strides.
  const bool flat = from.contiguous() && to.contiguous();
  const int64_t count = flat ? from.num_elements() : from.row_elements();
  constexpr int64_t kPiece = 1 << 14;
  const int64_t pieces = std::max<int64_t>(1, divide_up(count, kPiece));
  const int64_t rows = flat ? 1 : from.rows();
  const auto body = [&](int64_t index) {
    const int64_t row = index / pieces;
    const int64_t begin = index % pieces * kPiece;
    const int64_t length = std::min(kPiece, count - begin);
    if (to.dtype == DType::kF32) {
      load_row(codec, from, row, begin, length, to.row<float>(row) + begin);
    } else if (from.dtype == DType::kF32) {
      codec.f32_to_bf16(from.row<const float>(row) + begin, length, to.row<uint16_t>(row) + begin);
    } else {
      std::copy_n(from.row<const uint16_t>(row) + begin, length, to.row<uint16_t>(row) + begin);
    }
  };
  context.pool.parallel_for(rows * pieces, grain_for(std::min(count, kPiece)),
                            [&body](int64_t begin, int64_t end, int) {
                              for (int64_t index = begin; index < end; ++index) body(index);
                            });
}

}  // namespace octet::cpu
