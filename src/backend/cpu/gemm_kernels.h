// The inner loops of the linear products, on F32 operands that linear.cpp lays out.
//
// Two of them, both with one fixed order of additions per element of the result, whatever the tile:
//   dot:   C[m, n] = Σ_k A[m, k] B[n, k], operands contiguous along k (the forward). Lane l of a
//          vector sums the k with k mod lanes = l; the lanes are added at the end.
//   outer: C[m, n] = Σ_k A(m, k) B[k, n], B and C contiguous along n (both gradients). Each
//          element sums a chunk of k in order; the chunks' partial sums are added in order.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "tensor/tensor.h"

namespace octet::cpu {

constexpr int64_t kMaxLanes = 16;   // F32 in the widest vector
constexpr int64_t kDotColumns = 4;  // columns of one tile of `dot`

// Memory that the block after this one reads: it is brought near while this one is computed.
struct Ahead {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
};

// One range of k of a block of C. `depth` is a multiple of kMaxLanes: rows end in zeros.
struct DotBlock {
  const float* a = nullptr;  // [rows, depth], rows `a_stride` apart
  int64_t a_stride = 0;
  int64_t rows = 0;
  const float* b = nullptr;  // [columns, depth]
  int64_t b_stride = 0;
  int64_t columns = 0;  // a multiple of kDotColumns
  int64_t depth = 0;
  // Sums so far, [rows, columns] vectors; untouched where this range is the first and the last.
  float* running = nullptr;
  bool first = true;
  bool last = true;
  float* sums = nullptr;  // [rows, columns], written by the last range
  // Or null. With scales, the range is cut in pieces of 128 (the last may be shorter), and
  // running = fma(partial sum of the piece, a_scale × b_scale, running).
  const float* a_scales = nullptr;  // [rows, pieces], rows `a_scale_stride` apart
  int64_t a_scale_stride = 0;
  const float* b_scales = nullptr;  // [pieces], the same for all columns
  Ahead ahead;
};

// One chunk of k. C is F32 and accumulates: C = fma(partial, row_scale × column_scale, C).
// The last chunk may go on to out += C × alpha instead of writing C.
struct OuterBlock {
  const float* a = nullptr;  // A(m, k) = a[m · a_row + k · a_column]
  int64_t a_row = 0;
  int64_t a_column = 0;
  int64_t rows = 0;
  const float* b = nullptr;  // [depth, columns], rows `b_stride` apart
  int64_t b_stride = 0;
  int64_t columns = 0;  // a multiple of 64
  int64_t depth = 0;
  float* c = nullptr;  // [rows, columns], rows `c_stride` apart
  int64_t c_stride = 0;
  bool first = true;     // C is zero, whatever its memory holds
  float* out = nullptr;  // or null
  int64_t out_stride = 0;
  float alpha = 1.0f;
  const float* row_scales = nullptr;  // element m · row_scale_stride
  int64_t row_scale_stride = 0;
  const float* column_scales = nullptr;  // [columns]
  Ahead ahead;
};

// out = sum × column_scale × row_scale × alpha + bias + out, in F32 in this order, what is null or
// false left out, rounded once.
struct FinishBlock {
  const float* sums = nullptr;  // [rows, columns], rows `sum_stride` apart
  int64_t sum_stride = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  const float* column_scales = nullptr;
  int64_t column_scale_stride = 0;  // 0: one scale for all columns
  const float* row_scales = nullptr;
  int64_t row_scale_stride = 0;  // 0: one scale for all rows
  float alpha = 1.0f;
  const float* bias = nullptr;
  bool accumulate = false;
  void* out = nullptr;
  int64_t out_stride = 0;
  tensor::DType out_dtype = tensor::DType::kF32;  // or kBF16
};

struct GemmKernels {
  void (*dot)(const DotBlock& block);
  void (*outer)(const OuterBlock& block);
  void (*finish)(const FinishBlock& block);
};

const GemmKernels& gemm_kernels(Isa isa);

}  // namespace octet::cpu
