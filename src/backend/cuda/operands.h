// Views as the product takes them.
#pragma once

#include <span>
#include <string_view>

#include "backend/cuda/context.h"
#include "backend/cuda/product.h"
#include "ops/linear.h"

namespace octet::cuda {

// All weights have `columns` columns, dense ones BF16, quantised ones E4M3; returns how many rows
// they have together. Error naming the op otherwise.
int64_t check_weights(std::string_view op, std::span<const ops::Weight> weights, int64_t columns);

// Rows of `depth` elements whose base and stride are multiples of 16 bytes.
bool is_aligned(const tensor::TensorView& view);

// Base and stride of `view` itself, or of a padded copy in `slot` from byte `offset` on, which then
// grows by the copy. The slot must have room for what padded_bytes says.
struct Rows {
  const void* data;
  int64_t stride;
};
Rows aligned_rows(Context& context, const tensor::TensorView& view, ScratchSlot slot,
                  int64_t& offset);
int64_t padded_bytes(const tensor::TensorView& view);  // 0 where it needs no copy

}  // namespace octet::cuda
