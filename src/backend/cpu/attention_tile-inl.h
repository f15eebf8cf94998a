// What both directions of attention share, once per instruction set. All work is done on tiles of
// kAttentionTile key positions, decoded to F32; one routine, multiply_add, does every product.
#include <algorithm>
#include <cstring>
#include <limits>

#include "backend/cpu/simd-inl.h"
#include "ops/attention.h"

#ifndef OCTET_CPU_ATTENTION_ITEM_
#define OCTET_CPU_ATTENTION_ITEM_
namespace octet::cpu {

inline constexpr size_t kTile = static_cast<size_t>(ops::kAttentionTile);
inline constexpr size_t kMaxHeadWidth = 256;
inline constexpr size_t kMaxLanes = 16;  // F32 rows of scratch are padded to whole vectors

inline size_t padded_width(size_t width) { return (width + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

// Neighbouring query tokens of one sequence and the query heads of one key/value head.
struct AttentionItem {
  const int32_t* pages;  // of the sequence
  int64_t first_token;   // row of q
  int64_t num_tokens;
  int64_t first_position;  // of first_token
  int64_t kv_head;
};

// In floats.
inline size_t forward_scratch(size_t rows, size_t width) {
  const size_t padded = padded_width(width);
  return 2 * rows * padded + 2 * rows + 2 * kTile * padded + kTile * width + 4 * kTile;
}
inline size_t backward_scratch(size_t rows, size_t width, size_t length) {
  const size_t padded = padded_width(width);
  return 3 * rows * padded + 2 * rows + 2 * rows * kTile + 2 * kTile * padded + 2 * kTile * width +
         2 * length * padded;
}

}  // namespace octet::cpu
#endif

#if defined(OCTET_BACKEND_CPU_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_ATTENTION_TILE_INL_H_
#undef OCTET_BACKEND_CPU_ATTENTION_TILE_INL_H_
#else
#define OCTET_BACKEND_CPU_ATTENTION_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

using tensor::DType;
using tensor::TensorView;

// ---- elements in and out ----

// E4M3: the exponent field 1 … 15 moves to F32's; field 0 counts in 2^-9; 0x7F is NaN.
HWY_INLINE FloatVec decode_e4m3(FloatTag d, const uint8_t* from) {
  const hn::Rebind<uint8_t, FloatTag> d8;
  const hn::RebindToSigned<FloatTag> di;
  const auto code = hn::PromoteTo(di, hn::LoadU(d8, from));
  const auto magnitude = hn::And(code, hn::Set(di, 0x7F));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(di, 0x80)));
  const auto normal = hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 120 << 23)));
  const auto subnormal = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-9f));
  const auto small = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(di, 8)));
  const auto nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(di, 0x7F)));
  const auto quiet = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  const auto value = hn::IfThenElse(nan, quiet, hn::IfThenElse(small, subnormal, normal));
  return hn::Or(value, hn::BitCast(d, sign));
}

// out[0 … padded) = x (codes: x · scale), 0 past n
template <class T>
HWY_INLINE void widen_row(const T* x, size_t n, float* out) {
  const FloatTag d;
  const size_t padded = padded_width(n);
  for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
    store_full(d, i < n ? load(d, x + i, n - i) : hn::Zero(d), out + i);
  }
}
HWY_INLINE void widen_row(const uint8_t* x, float scale, size_t n, float* out) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) store_full(d, hn::Mul(decode_e4m3(d, x + i), factor), out + i);
  if (i < n) {
    uint8_t rest[hn::MaxLanes(FloatTag())] = {};
    std::memcpy(rest, x + i, n - i);
    store_full(d, hn::Mul(decode_e4m3(d, rest), factor), out + i);
    i += lanes;
  }
  for (; i < padded_width(n); i += lanes) store_full(d, hn::Zero(d), out + i);
}
HWY_INLINE void widen_row_any(DType dtype, const void* x, size_t n, float* out) {
  if (dtype == DType::kF32) {
    widen_row(static_cast<const float*>(x), n, out);
  } else {
    widen_row(static_cast<const uint16_t*>(x), n, out);
  }
}

// to = x, rounded once
template <class T>
HWY_INLINE void narrow_row(const float* x, size_t n, T* to) {
  const FloatTag d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) store(d, load(d, x + i, n - i), to + i, n - i);
}
HWY_INLINE void narrow_row_any(DType dtype, const float* x, size_t n, void* to) {
  if (dtype == DType::kF32) {
    narrow_row(x, n, static_cast<float*>(to));
  } else {
    narrow_row(x, n, static_cast<uint16_t*>(to));
  }
}

// Positions [begin, end) of one head, decoded into rows of `tile` [kTile, padded width] from
// `tile_begin` up; the other rows become 0.
HWY_INLINE void load_tile(const TensorView& cache, const TensorView& scales,
                          const AttentionItem& item, size_t tile_begin, size_t begin, size_t end,
                          float* tile) {
  const int64_t page_size = cache.shape[2];
  const auto width = static_cast<size_t>(cache.shape[3]);
  const size_t padded = padded_width(width);
  for (size_t j = 0; j < kTile; ++j) {
    const size_t position = tile_begin + j;
    float* row = tile + j * padded;
    if (position < begin || position >= end) {
      std::memset(row, 0, padded * sizeof(float));
      continue;
    }
    const auto p = static_cast<int64_t>(position);
    const int64_t page = item.pages[p / page_size];
    const int64_t slot = item.kv_head * page_size + p % page_size;
    const int64_t at = page * cache.row_stride + slot * cache.shape[3];
    if (cache.dtype == DType::kE4M3) {
      const float scale = scales.row<float>(page)[slot];
      widen_row(cache.as<uint8_t>() + at, scale, width, row);
    } else if (cache.dtype == DType::kF32) {
      widen_row(cache.as<float>() + at, width, row);
    } else {
      widen_row(cache.as<uint16_t>() + at, width, row);
    }
  }
}

// The 16 tokens of a block of E4M3 values, codes [width][16], as rows `to` [16][stride].
HWY_INLINE void transpose_block(const uint8_t* block, size_t width, size_t stride, uint8_t* to) {
  size_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<uint8_t, 16> d8;
  for (; c + 16 <= width; c += 16) {
    // Interleaving the lower with the upper half of sixteen rows four times transposes them.
    hn::Vec<decltype(d8)> rows[16], next[16];
    for (size_t i = 0; i < 16; ++i) rows[i] = hn::LoadU(d8, block + (c + i) * 16);
    for (int round = 0; round < 4; ++round) {
      for (size_t i = 0; i < 8; ++i) {
        next[2 * i] = hn::InterleaveLower(d8, rows[i], rows[i + 8]);
        next[2 * i + 1] = hn::InterleaveUpper(d8, rows[i], rows[i + 8]);
      }
      for (size_t i = 0; i < 16; ++i) rows[i] = next[i];
    }
    for (size_t i = 0; i < 16; ++i) {
      const auto place = static_cast<size_t>(ops::value_place(static_cast<int64_t>(i)));
      hn::StoreU(rows[place], d8, to + i * stride + c);
    }
  }
#endif
  for (; c < width; ++c) {
    for (size_t i = 0; i < 16; ++i) {
      const auto place = static_cast<size_t>(ops::value_place(static_cast<int64_t>(i)));
      to[i * stride + c] = block[c * 16 + place];
    }
  }
}

// The values' counterpart of load_tile.
HWY_INLINE void load_values(const ops::KvCacheView& cache, const AttentionItem& item,
                            size_t tile_begin, size_t begin, size_t end, float* tile) {
  constexpr auto kBlock = static_cast<size_t>(ops::kValueBlock);
  if (cache.v.dtype != DType::kE4M3) {
    return load_tile(cache.v, cache.v_scale, item, tile_begin, begin, end, tile);
  }
  const int64_t page_size = cache.page_size();
  const auto width = static_cast<size_t>(cache.v.shape[3]);
  const size_t padded = padded_width(width);
  uint8_t codes[kBlock * kMaxHeadWidth];
  for (size_t j = 0; j < kTile; j += kBlock, tile += kBlock * padded) {
    const size_t position = tile_begin + j;
    if (position + kBlock <= begin || position >= end) {
      std::memset(tile, 0, kBlock * padded * sizeof(float));
      continue;
    }
    const auto p = static_cast<int64_t>(position);
    const int64_t page = item.pages[p / page_size];
    const int64_t slot = item.kv_head * page_size + p % page_size;
    transpose_block(cache.v.as<uint8_t>() + page * cache.v.row_stride + slot * cache.v.shape[3],
                    width, padded, codes);
    for (size_t i = 0; i < kBlock; ++i) {
      if (position + i < begin || position + i >= end) {
        std::memset(tile + i * padded, 0, padded * sizeof(float));
      } else {
        widen_row(codes + i * padded,
                  cache.v_scale.row<float>(page)[slot + static_cast<int64_t>(i)], width,
                  tile + i * padded);
      }
    }
  }
}

// out [width, kTile] = tileᵀ
HWY_INLINE void transpose_tile(const float* tile, size_t width, float* out) {
  const size_t padded = padded_width(width);
  size_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d4;
  const hn::Repartition<double, decltype(d4)> d2;
  for (; c + 4 <= width; c += 4) {
    for (size_t j = 0; j < kTile; j += 4) {
      const float* from = tile + j * padded + c;
      const auto r0 = hn::LoadU(d4, from), r1 = hn::LoadU(d4, from + padded);
      const auto r2 = hn::LoadU(d4, from + 2 * padded), r3 = hn::LoadU(d4, from + 3 * padded);
      const auto low01 = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
      const auto low23 = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
      const auto high01 = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
      const auto high23 = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
      float* to = out + c * kTile + j;
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, low01, low23)), d4, to);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, low01, low23)), d4, to + kTile);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, high01, high23)), d4, to + 2 * kTile);
      hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, high01, high23)), d4, to + 3 * kTile);
    }
  }
#endif
  for (; c < width; ++c) {
    for (size_t j = 0; j < kTile; ++j) out[c * kTile + j] = tile[j * padded + c];
  }
}

// ---- the product ----

// c[r, :] (+)= Σ_k a(r, k) b[k, :] for k in [begin, end), in order of k, whatever R and V are.
struct Product {
  const float* a;
  size_t a_row, a_k;  // strides
  const float* b;
  size_t b_k;
  float* c;
  size_t c_row;
  bool accumulate;
};

template <int R, int V>
HWY_INLINE void multiply_add_block(const Product& p, size_t begin, size_t end, size_t column) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  FloatVec sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      const float* c = p.c + static_cast<size_t>(r) * p.c_row + column;
      sum[r][v] = p.accumulate ? hn::LoadU(d, c + static_cast<size_t>(v) * lanes) : hn::Zero(d);
    }
  }
  const float* a = p.a + begin * p.a_k;
  const float* b = p.b + begin * p.b_k + column;
  for (size_t k = begin; k < end; ++k, a += p.a_k, b += p.b_k) {
    FloatVec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = hn::LoadU(d, b + static_cast<size_t>(v) * lanes);
    for (int r = 0; r < R; ++r) {
      const auto factor = hn::Set(d, a[static_cast<size_t>(r) * p.a_row]);
      for (int v = 0; v < V; ++v) sum[r][v] = hn::MulAdd(factor, bv[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      float* c = p.c + static_cast<size_t>(r) * p.c_row + column;
      hn::StoreU(sum[r][v], d, c + static_cast<size_t>(v) * lanes);
    }
  }
}

template <int R>
HWY_INLINE void multiply_add_rows(const Product& p, size_t begin, size_t end, size_t columns) {
  const size_t lanes = hn::Lanes(FloatTag());
  constexpr int kVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
  size_t column = 0;
  for (; column + kVectors * lanes <= columns; column += kVectors * lanes) {
    multiply_add_block<R, kVectors>(p, begin, end, column);
  }
  for (; column < columns; column += lanes) multiply_add_block<R, 1>(p, begin, end, column);
}

// `rows` up to 4, `columns` a multiple of kMaxLanes.
HWY_NOINLINE void multiply_add(const Product& p, size_t rows, size_t begin, size_t end,
                               size_t columns) {
  if (rows == 4) return multiply_add_rows<4>(p, begin, end, columns);
  if (rows == 3) return multiply_add_rows<3>(p, begin, end, columns);
  if (rows == 2) return multiply_add_rows<2>(p, begin, end, columns);
  if (rows == 1) return multiply_add_rows<1>(p, begin, end, columns);
}

// ---- what a query sees ----

// Which of a tile's columns one query position sees.
struct Columns {
  size_t begin, end;
  bool empty() const { return begin >= end; }
};
HWY_INLINE Columns seen(int64_t position, int64_t window, size_t tile_begin) {
  const int64_t first = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  const auto tile = static_cast<int64_t>(tile_begin);
  const auto size = static_cast<int64_t>(kTile);
  return {static_cast<size_t>(std::clamp<int64_t>(first - tile, 0, size)),
          static_cast<size_t>(std::clamp<int64_t>(position + 1 - tile, 0, size))};
}

// Lane i of vector `v` of a tile lies in `columns`.
HWY_INLINE auto in_columns(FloatTag d, size_t v, const Columns& columns) {
  const auto index = hn::Iota(d, static_cast<float>(v * hn::Lanes(d)));
  return hn::And(hn::Ge(index, hn::Set(d, static_cast<float>(columns.begin))),
                 hn::Lt(index, hn::Set(d, static_cast<float>(columns.end))));
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#endif
