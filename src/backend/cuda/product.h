// The one matrix product behind every linear op: y [T, ΣN] = x [T, K] · w [N, K]ᵀ for a group of
// weights. Its arithmetic is the numeric class of each format, whatever T:
//   BF16: one FP32 chain over K in steps of 16; of a segmented weight (few rows of many inputs, an
//          adapter's A), one for each 512 of K, added up from zero in order of K;
//   8-bit: partial sums of 128 of K from zero, in steps of 32, then folded in order of K:
//          acc += partial, scaled at the end as (acc × w_scale) × x_scale, or with block scales
//          acc = fma(partial, x_scale × w_scale, acc).
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/context.h"

namespace octet::cuda {

enum class ProductFormat { kBF16, kScaled, kBlocks };

// Rows of K elements each, `stride` elements apart. Base and stride are multiples of 16 bytes.
struct ProductWeight {
  const void* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  // kScaled: scale of row r at r × scale_stride (0 or 1). kBlocks: that of row r and chunk c (of
  // 128) at (r / row_block) × scale_stride + c × chunk_stride.
  const float* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t chunk_stride = 1;
  int row_block = 1;
  int64_t x_offset = 0;  // elements into each row of x, whole 16 bytes: where its K begin
};

struct Product {
  static constexpr int kMaxWeights = 4;
  ProductFormat format = ProductFormat::kBF16;
  bool x_is_e5m2 = false;  // weights are E4M3
  ProductWeight weights[kMaxWeights];
  int num_weights = 0;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const float* x_scales = nullptr;  // as a weight's, row_block and chunk_stride 1
  int64_t x_scale_stride = 0;
  int64_t num_tokens = 0;
  int64_t depth = 0;  // K; what lies beyond it up to a multiple of 16 bytes is read and must be 0

  void* y = nullptr;
  bool y_is_bf16 = true;
  int64_t y_stride = 0;
  const void* bias = nullptr;  // [ΣN] or null
  bool bias_is_bf16 = false;
  float alpha = 1;
  bool accumulate = false;
  bool settled = false;    // as ops::LinearArgs's
  bool x_settled = false;  // likewise; only with `settled`
  bool segmented = false;  // BF16 only; all of the weights
};

// y = alpha × product (+ bias) (+ y), rounded once: by the own kernel, or by whatever is faster and
// gives the same bytes.
void run_own_product(Context& context, const Product& product);
void run_product(Context& context, const Product& product);
// Whether a BF16 weight [rows, depth] of the forward product is segmented.
bool is_segmented(int64_t rows, int64_t depth);
// Needs all x_offset to be 0.
void run_segmented_product(Context& context, const Product& product);
// The own kernel's bytes where K is small, an adapter's B; false: not served.
bool run_shallow_product(Context& context, const Product& product);
// The own kernel's bytes where there are up to 1,024 tokens of codes and one weight; false: not
// served.
bool run_wide_product(Context& context, const Product& product);
// The own kernel of every device but Hopper's: 8-bit steps of 32 are summed as its units do it, so
// the 8-bit formats are a class of their own there.
void run_portable_product(Context& context, const Product& product);

// Runs body(format, x is E5M2) with both as compile-time constants.
template <class Body>
void with_product_types(const Product& product, const Body& body) {
  using Format = ProductFormat;
  const auto with_input = [&](auto format) {
    product.x_is_e5m2 ? body(format, std::true_type()) : body(format, std::false_type());
  };
  switch (product.format) {
    case Format::kBF16:
      return body(std::integral_constant<Format, Format::kBF16>(), std::false_type());
    case Format::kScaled:
      return with_input(std::integral_constant<Format, Format::kScaled>());
    case Format::kBlocks:
      return with_input(std::integral_constant<Format, Format::kBlocks>());
  }
}

}  // namespace octet::cuda
