// The forward product of few rows: the weights are read once, so they are decoded in registers.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "tensor/tensor.h"

namespace octet::cpu {

constexpr int64_t kGemvRows = 4;  // at most

// All of k of a block of C, with the additions of `dot` (gemm_kernels.h): the bytes are the same.
struct GemvBlock {
  const float* a = nullptr;  // [rows, depth rounded up to kMaxLanes], zeros at the end
  int64_t a_stride = 0;
  int64_t rows = 0;
  const void* b = nullptr;  // [columns, depth] of b_dtype: F32, BF16 or codes without scale
  int64_t b_stride = 0;     // elements
  tensor::DType b_dtype = tensor::DType::kF32;
  int64_t columns = 0;
  int64_t depth = 0;
  float* sums = nullptr;  // [rows, columns], rows `sum_stride` apart, rounded up to kDotColumns
  int64_t sum_stride = 0;
  // Or null: as in DotBlock. Only for codes.
  const float* a_scales = nullptr;
  int64_t a_scale_stride = 0;
  const float* b_scales = nullptr;
};

// Null where the instruction set has no kernel.
using GemvKernel = void (*)(const GemvBlock& block);
GemvKernel gemv_kernel(Isa isa);

}  // namespace octet::cpu
