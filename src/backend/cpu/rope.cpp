#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rope.cpp"  // NOLINT
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

using tensor::DType;

// One token: `heads` rows of 2 · half, table_row = cos (half), sin (half).
template <class T>
void rotate_heads(const T* x, const float* table_row, T* y, size_t heads, size_t half,
                  bool inverse) {
  const FloatTag d;
  for (size_t h = 0; h < heads; ++h, x += 2 * half, y += 2 * half) {
    for (size_t i = 0; i < half; i += hn::Lanes(d)) {
      const size_t left = half - i;
      const auto cos = load(d, table_row + i, left);
      auto sin = load(d, table_row + half + i, left);
      if (inverse) sin = hn::Neg(sin);
      const auto low = load(d, x + i, left);
      const auto high = load(d, x + half + i, left);
      store(d, hn::Sub(hn::Mul(low, cos), hn::Mul(high, sin)), y + i, left);
      store(d, hn::Add(hn::Mul(high, cos), hn::Mul(low, sin)), y + half + i, left);
    }
  }
}

void rotate_heads_any(DType dtype, const void* x, const float* table_row, void* y, size_t heads,
                      size_t half, bool inverse) {
  if (dtype == DType::kF32) {
    rotate_heads(static_cast<const float*>(x), table_row, static_cast<float*>(y), heads, half,
                 inverse);
  } else {
    rotate_heads(static_cast<const uint16_t*>(x), table_row, static_cast<uint16_t*>(y), heads, half,
                 inverse);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {

void rope(Context& context, const ops::RopeArgs& args) {
  constexpr std::string_view kOp = "rope";
  require_rank(kOp, "x", args.x, 3, 3);
  require_float(kOp, "x", args.x);
  require_shape(kOp, "y", args.y, args.x.shape);
  require_dtype(kOp, "y", args.y, args.x.dtype);
  const int64_t num_tokens = args.x.shape[0];
  const int64_t heads = args.x.shape[1];
  const int64_t width = args.x.shape[2];
  if (width % 2 != 0) fail(kOp, "the head width must be even, but is {}", width);
  require_rank(kOp, "table", args.table, 2, 2);
  require_dtype(kOp, "table", args.table, tensor::DType::kF32);
  const int64_t num_positions = args.table.shape[0];
  require_shape(kOp, "table", args.table, tensor::Shape{num_positions, width});
  require_vector(kOp, "positions", args.positions, tensor::DType::kI32, num_tokens);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t position = *args.positions.row<int32_t>(t);
    if (position < 0 || position >= num_positions) {
      fail(kOp, "position {} of token {} is not in [0, {})", position, t, num_positions);
    }
  }
  const auto rotate_heads = OCTET_CPU_KERNEL(context.isa, rotate_heads_any);
  parallel(context, num_tokens, heads * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      rotate_heads(args.x.dtype, row_at(args.x, t),
                   args.table.row<float>(*args.positions.row<int32_t>(t)), row_at(args.y, t),
                   static_cast<size_t>(heads), static_cast<size_t>(width / 2), args.inverse);
    }
  });
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
