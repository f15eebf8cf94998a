#include "backend/cpu/gemv_kernels.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemv_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/decode-inl.h"
#include "backend/cpu/gemm_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octet::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using tensor::DType;
using tensor::kScaleBlock;

// Two vectors of values.
HWY_INLINE void load_two(const float* from, FloatVec& low, FloatVec& high) {
  low = load(from);
  high = load(from + kLanes);
}
HWY_INLINE void load_two(const uint16_t* from, FloatVec& low, FloatVec& high) {
  const hn::RebindToUnsigned<F32> u32;
  const hn::Rebind<uint16_t, F32> u16;
  low = hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(u32, hn::LoadU(u16, from))));
  high = hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(u32, hn::LoadU(u16, from + kLanes))));
}

template <DType kType>
struct Weights {
  using Element = uint8_t;
  static HWY_INLINE void load(const Element* from, FloatVec& low, FloatVec& high) {
    decode_two_vectors<kType>(from, low, high);
  }
};
template <>
struct Weights<DType::kF32> {
  using Element = float;
  static HWY_INLINE void load(const Element* from, FloatVec& low, FloatVec& high) {
    load_two(from, low, high);
  }
};
template <>
struct Weights<DType::kBF16> {
  using Element = uint16_t;
  static HWY_INLINE void load(const Element* from, FloatVec& low, FloatVec& high) {
    load_two(from, low, high);
  }
};

constexpr int64_t kStep = 2 * kLanes;

// One step of k; `two` is false where the second vector lies beyond the rows of a.
template <DType kType, int kRows>
HWY_INLINE void add_step(FloatVec (&sum)[kRows][kDotColumns], const float* const (&a)[kRows],
                         const typename Weights<kType>::Element* const (&b)[kDotColumns],
                         bool two) {
  FloatVec u[kRows][2];
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    u[r][0] = load(a[r]);
    u[r][1] = two ? load(a[r] + kLanes) : zeros();
  }
  OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
    FloatVec low, high;
    Weights<kType>::load(b[j], low, high);
    OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
      sum[r][j] = multiply_add(u[r][0], low, sum[r][j]);
      if (two) sum[r][j] = multiply_add(u[r][1], high, sum[r][j]);
    }
  }
}

template <DType kType, int kRows>
struct Tile {
  using Element = typename Weights<kType>::Element;

  const GemvBlock& block;
  const float* a[kRows];
  const Element* b[kDotColumns];

  HWY_INLINE Tile(const GemvBlock& block, int64_t column) : block(block) {
    OCTET_UNROLL for (int r = 0; r < kRows; ++r) a[r] = block.a + r * block.a_stride;
    OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
      // Columns past the last repeat it; their sums are not used.
      const int64_t index = std::min(column + j, block.columns - 1);
      b[j] = static_cast<const Element*>(block.b) + index * block.b_stride;
    }
  }

  // sum += products of the k from `begin` to `end`, and zeros up to a whole vector of kMaxLanes.
  HWY_INLINE void add(FloatVec (&sum)[kRows][kDotColumns], int64_t begin, int64_t end) const {
    const float* u[kRows];
    const Element* v[kDotColumns];
    int64_t k = begin;
    for (; k + kStep <= end; k += kStep) {
      OCTET_UNROLL for (int r = 0; r < kRows; ++r) u[r] = a[r] + k;
      OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
        v[j] = b[j] + k;
        __builtin_prefetch(v[j] + kDotColumns * block.b_stride);  // of the next tile
      }
      add_step<kType, kRows>(sum, u, v, true);
    }
    if (k == end) return;
    Element rest[kDotColumns][kStep] = {};
    OCTET_UNROLL for (int r = 0; r < kRows; ++r) u[r] = a[r] + k;
    OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
      std::memcpy(rest[j], b[j] + k, static_cast<size_t>(end - k) * sizeof(Element));
      v[j] = rest[j];
    }
    const int64_t padded_end = (end + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    if (k + kLanes < padded_end) {
      add_step<kType, kRows>(sum, u, v, true);
    } else {
      add_step<kType, kRows>(sum, u, v, false);
    }
  }
};

template <int kRows>
HWY_INLINE void clear(FloatVec (&sum)[kRows][kDotColumns]) {
  OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
    OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) sum[r][j] = zeros();
  }
}

template <DType kType, int kRows, bool kScaled>
void gemv_rows(const GemvBlock& block) {
  for (int64_t column = 0; column < block.columns; column += kDotColumns) {
    const Tile<kType, kRows> tile(block, column);
    FloatVec total[kRows][kDotColumns];
    clear(total);
    if constexpr (kScaled) {
      for (int64_t piece = 0; piece * kScaleBlock < block.depth; ++piece) {
        const int64_t begin = piece * kScaleBlock;
        FloatVec partial[kRows][kDotColumns];
        clear(partial);
        tile.add(partial, begin, std::min(begin + kScaleBlock, block.depth));
        OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
          const FloatVec scale =
              all(block.a_scales[r * block.a_scale_stride + piece] * block.b_scales[piece]);
          OCTET_UNROLL for (int j = 0; j < kDotColumns; ++j) {
            total[r][j] = multiply_add(partial[r][j], scale, total[r][j]);
          }
        }
      }
    } else {
      tile.add(total, 0, block.depth);
    }
    OCTET_UNROLL for (int r = 0; r < kRows; ++r) {
      store_sums(total[r], block.sums + r * block.sum_stride + column);
    }
  }
}

template <DType kType, int kRows>
void gemv_of(const GemvBlock& block) {
  if constexpr (kRows > 1) {
    if (block.rows < kRows) return gemv_of<kType, kRows - 1>(block);
  }
  if constexpr (kType == DType::kE4M3 || kType == DType::kE5M2) {
    if (block.a_scales != nullptr) return gemv_rows<kType, kRows, true>(block);
  }
  gemv_rows<kType, kRows, false>(block);
}

void gemv(const GemvBlock& block) {
  switch (block.b_dtype) {
    case DType::kBF16:
      return gemv_of<DType::kBF16, kGemvRows>(block);
    case DType::kE4M3:
      return gemv_of<DType::kE4M3, kGemvRows>(block);
    case DType::kE5M2:
      return gemv_of<DType::kE5M2, kGemvRows>(block);
    default:
      return gemv_of<DType::kF32, kGemvRows>(block);
  }
}

constexpr GemvKernel kGemv = gemv;
#else
constexpr GemvKernel kGemv = nullptr;
#endif

}  // namespace octet::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octet::cpu {

GemvKernel gemv_kernel(Isa isa) { return OCTET_CPU_KERNEL(isa, kGemv); }

}  // namespace octet::cpu
#endif
