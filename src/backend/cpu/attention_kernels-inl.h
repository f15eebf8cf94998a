// The kernels of attention, once per instruction set. All work is done on tiles of kAttentionTile
// key positions, decoded to F32; one routine, multiply_add, does every product.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/simd-inl.h"
#include "ops/attention.h"

#ifndef OCTET_CPU_ATTENTION_ITEM_
#define OCTET_CPU_ATTENTION_ITEM_
namespace octet::cpu {

inline constexpr size_t kTile = static_cast<size_t>(ops::kAttentionTile);
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

#if defined(OCTET_BACKEND_CPU_ATTENTION_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_ATTENTION_KERNELS_INL_H_
#undef OCTET_BACKEND_CPU_ATTENTION_KERNELS_INL_H_
#else
#define OCTET_BACKEND_CPU_ATTENTION_KERNELS_INL_H_
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
  const int64_t page_size = cache.shape[1], num_heads = cache.shape[2];
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
    const int64_t slot = (p % page_size) * num_heads + item.kv_head;
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

// ---- forward ----

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

// One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867): scores [kTile] turn
// into weights, 0 outside `columns`; maximum, sum and out are brought to the new maximum.
HWY_INLINE void fold_tile(float* scores, const Columns& columns, float scale, float* maximum,
                          float* sum, float* out, size_t padded) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto largest = lowest;
  for (size_t v = 0; v * lanes < kTile; ++v) {
    const auto scaled = hn::Mul(hn::LoadU(d, scores + v * lanes), hn::Set(d, scale));
    const auto masked = hn::IfThenElse(in_columns(d, v, columns), scaled, lowest);
    largest = hn::Max(largest, masked);
    hn::StoreU(masked, d, scores + v * lanes);
  }
  const float tile_maximum = max_lanes(d, largest);
  const float new_maximum = tile_maximum > *maximum ? tile_maximum : *maximum;
  auto tile_sum = hn::Zero(d);
  for (size_t v = 0; v * lanes < kTile; ++v) {
    const auto weight = exp(d, hn::Sub(hn::LoadU(d, scores + v * lanes), hn::Set(d, new_maximum)));
    tile_sum = hn::Add(tile_sum, weight);
    hn::StoreU(weight, d, scores + v * lanes);
  }
  if (new_maximum != *maximum) {
    const auto correction = exp(d, hn::Set(d, *maximum - new_maximum));
    *sum *= hn::GetLane(correction);
    for (size_t i = 0; i < padded; i += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, out + i), correction), d, out + i);
    }
    *maximum = new_maximum;
  }
  *sum += sum_lanes(d, tile_sum);
}

// out rows (up to 4) += weights · values, each row over its own columns in their order: what a row
// does not see is not touched, not even by a zero.
HWY_INLINE void add_values(const float* weights, const Columns* columns, size_t rows,
                           const float* values, float* out, size_t padded) {
  size_t begin = 0, end = kTile;  // what all rows see
  for (size_t r = 0; r < rows; ++r) {
    begin = std::max(begin, columns[r].begin);
    end = std::min(end, columns[r].end);
  }
  end = std::max(begin, end);
  const Product all{weights, kTile, 1, values, padded, out, padded, true};
  for (size_t r = 0; r < rows; ++r) {
    Product one = all;
    one.a += r * kTile;
    one.c += r * padded;
    if (columns[r].begin < std::min(begin, columns[r].end)) {
      multiply_add(one, 1, columns[r].begin, std::min(begin, columns[r].end), padded);
    }
  }
  if (begin < end) multiply_add(all, rows, begin, end, padded);
  for (size_t r = 0; r < rows; ++r) {
    Product one = all;
    one.a += r * kTile;
    one.c += r * padded;
    const size_t from = std::max(end, columns[r].begin);
    if (from < columns[r].end) multiply_add(one, 1, from, columns[r].end, padded);
  }
}

void attention_item(const ops::AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const FloatTag d;
  const auto width = static_cast<size_t>(args.q.shape[2]);
  const size_t padded = padded_width(width);
  const auto group = static_cast<size_t>(args.q.shape[1] / args.cache.k.shape[2]);
  const size_t rows = group * static_cast<size_t>(item.num_tokens);
  const int64_t first_head = item.kv_head * static_cast<int64_t>(group);
  const auto element_bytes = static_cast<size_t>(tensor::dtype_bytes(args.q.dtype));
  float* q = scratch;                     // [rows, padded], as all of these on whole cache lines
  float* out = q + rows * padded;         // [rows, padded]
  float* scores = out + rows * padded;    // [4, kTile]
  float* tile = scores + 4 * kTile;       // [kTile, padded]
  float* values = tile + kTile * padded;  // [kTile, padded]
  float* keys = values + kTile * padded;  // [width, kTile]
  float* maximum = keys + width * kTile;  // [rows]
  float* sum = maximum + rows;            // [rows]

  for (size_t r = 0; r < rows; ++r) {
    const auto token = item.first_token + static_cast<int64_t>(r / group);
    const size_t head = static_cast<size_t>(first_head) + r % group;
    const auto* from =
        reinterpret_cast<const char*>(args.q.data) +
        (static_cast<size_t>(token * args.q.row_stride) + head * width) * element_bytes;
    widen_row_any(args.q.dtype, from, width, q + r * padded);
    maximum[r] = -std::numeric_limits<float>::infinity();
    sum[r] = 0;
  }
  std::memset(out, 0, rows * padded * sizeof(float));

  const auto end = static_cast<size_t>(item.first_position + item.num_tokens);
  const size_t begin =
      args.window > 0
          ? static_cast<size_t>(std::max<int64_t>(0, item.first_position + 1 - args.window))
          : 0;
  for (size_t tile_begin = begin / kTile * kTile; tile_begin < end; tile_begin += kTile) {
    load_tile(args.cache.k, args.cache.k_scale, item, tile_begin, begin, end, tile);
    transpose_tile(tile, width, keys);
    load_tile(args.cache.v, args.cache.v_scale, item, tile_begin, begin, end, values);
    // A tile that a token does not see at all leaves no trace in its rows; blocks of rows may span
    // tokens, but not tokens that see nothing here (the first ones, and with a window the last).
    size_t r = 0;
    while (r < rows) {
      Columns columns[4];
      size_t count = 0;
      while (count < 4 && r + count < rows) {
        const auto token = static_cast<int64_t>((r + count) / group);
        columns[count] = seen(item.first_position + token, args.window, tile_begin);
        if (columns[count].empty()) break;
        ++count;
      }
      if (count == 0) {
        ++r;
        continue;
      }
      multiply_add(Product{q + r * padded, padded, 1, keys, kTile, scores, kTile, false}, count, 0,
                   width, kTile);
      for (size_t i = 0; i < count; ++i) {
        fold_tile(scores + i * kTile, columns[i], args.scale, &maximum[r + i], &sum[r + i],
                  out + (r + i) * padded, padded);
      }
      add_values(scores, columns, count, values, out + r * padded, padded);
      r += count;
    }
  }

  for (size_t r = 0; r < rows; ++r) {
    const auto token = item.first_token + static_cast<int64_t>(r / group);
    const size_t head = static_cast<size_t>(first_head) + r % group;
    float* row = out + r * padded;
    for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
      hn::StoreU(hn::Div(hn::LoadU(d, row + i), hn::Set(d, sum[r])), d, row + i);
    }
    auto* to = reinterpret_cast<char*>(args.out.data) +
               (static_cast<size_t>(token * args.out.row_stride) + head * width) * element_bytes;
    narrow_row_any(args.out.dtype, row, width, to);
    if (!args.lse.empty()) {
      args.lse.row<float>(token)[head] =
          static_cast<float>(static_cast<double>(maximum[r]) + std::log(double{sum[r]}));
    }
  }
}

// ---- backward ----

// With p = exp(scale q·k − lse), dp = dout·v and δ = dout·out:
//   ds = p (dp − δ) scale;  dq += ds k;  dk += ds q;  dv += p dout
// (Dao, arXiv 2307.08691). One sequence and one key/value head at a time, `block` query tokens by
// kTile keys.
void attention_backward_item(const ops::AttentionBackwardArgs& args, const AttentionItem& item,
                             int64_t block, float* scratch) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto width = static_cast<size_t>(args.q.shape[2]);
  const size_t padded = padded_width(width);
  const auto group = static_cast<size_t>(args.q.shape[1] / args.cache.k.shape[2]);
  const size_t max_rows = group * static_cast<size_t>(block);
  const auto length = static_cast<size_t>(item.num_tokens);
  const size_t first_head = static_cast<size_t>(item.kv_head) * group;
  const DType dtype = args.q.dtype;
  const auto element_bytes = static_cast<size_t>(tensor::dtype_bytes(dtype));
  float* q = scratch;                        // [rows, padded], as all of these on whole cache lines
  float* dout = q + max_rows * padded;       // [rows, padded]
  float* dq = dout + max_rows * padded;      // [rows, padded]
  float* p = dq + max_rows * padded;         // [rows, kTile]
  float* ds = p + max_rows * kTile;          // [rows, kTile]
  float* keys = ds + max_rows * kTile;       // [kTile, padded]
  float* values = keys + kTile * padded;     // [kTile, padded]
  float* keys_t = values + kTile * padded;   // [width, kTile]
  float* values_t = keys_t + kTile * width;  // [width, kTile]
  float* dk = values_t + kTile * width;      // [length, padded]
  float* dv = dk + length * padded;          // [length, padded]
  float* lse = dv + length * padded;         // [rows]
  float* delta = lse + max_rows;             // [rows]
  std::memset(dk, 0, 2 * length * padded * sizeof(float));

  const auto element = [&](const TensorView& view, size_t token, size_t head) HWY_ATTR {
    const auto row = static_cast<size_t>(item.first_token) + token;
    return static_cast<char*>(view.data) +
           (row * static_cast<size_t>(view.row_stride) + head * width) * element_bytes;
  };

  for (size_t first = 0; first < length; first += static_cast<size_t>(block)) {
    const size_t num_tokens = std::min(static_cast<size_t>(block), length - first);
    const size_t rows = num_tokens * group;
    for (size_t r = 0; r < rows; ++r) {
      const size_t token = first + r / group;
      const size_t head = first_head + r % group;
      widen_row_any(dtype, element(args.q, token, head), width, q + r * padded);
      widen_row_any(dtype, element(args.dout, token, head), width, dout + r * padded);
      widen_row_any(dtype, element(args.out, token, head), width, dq + r * padded);
      auto dot = hn::Zero(d);
      for (size_t i = 0; i < padded; i += lanes) {
        dot =
            hn::MulAdd(hn::LoadU(d, dout + r * padded + i), hn::LoadU(d, dq + r * padded + i), dot);
      }
      delta[r] = sum_lanes(d, dot);
      lse[r] = args.lse.row<float>(item.first_token + static_cast<int64_t>(token))[head];
    }
    std::memset(dq, 0, rows * padded * sizeof(float));

    const size_t end = first + num_tokens;
    const size_t begin = args.window > 0 && first + 1 > static_cast<size_t>(args.window)
                             ? first + 1 - static_cast<size_t>(args.window)
                             : 0;
    for (size_t tile_begin = begin / kTile * kTile; tile_begin < end; tile_begin += kTile) {
      load_tile(args.cache.k, args.cache.k_scale, item, tile_begin, begin, end, keys);
      transpose_tile(keys, width, keys_t);
      load_tile(args.cache.v, args.cache.v_scale, item, tile_begin, begin, end, values);
      transpose_tile(values, width, values_t);
      for (size_t r = 0; r < rows; r += 4) {
        const size_t count = std::min<size_t>(4, rows - r);
        multiply_add(Product{q + r * padded, padded, 1, keys_t, kTile, p + r * kTile, kTile, false},
                     count, 0, width, kTile);
        multiply_add(
            Product{dout + r * padded, padded, 1, values_t, kTile, ds + r * kTile, kTile, false},
            count, 0, width, kTile);
        for (size_t i = r; i < r + count; ++i) {
          const Columns columns =
              seen(static_cast<int64_t>(first + i / group), args.window, tile_begin);
          for (size_t v = 0; v * lanes < kTile; ++v) {
            float* p_at = p + i * kTile + v * lanes;
            float* ds_at = ds + i * kTile + v * lanes;
            const auto mask = in_columns(d, v, columns);
            const auto score = hn::Mul(hn::LoadU(d, p_at), hn::Set(d, args.scale));
            const auto weight =
                hn::IfThenElseZero(mask, exp(d, hn::Sub(score, hn::Set(d, lse[i]))));
            const auto slope =
                hn::Mul(hn::Sub(hn::LoadU(d, ds_at), hn::Set(d, delta[i])), hn::Set(d, args.scale));
            hn::StoreU(weight, d, p_at);
            hn::StoreU(hn::IfThenElseZero(mask, hn::Mul(weight, slope)), d, ds_at);
          }
        }
        multiply_add(Product{ds + r * kTile, kTile, 1, keys, padded, dq + r * padded, padded, true},
                     count, 0, kTile, padded);
      }
      const size_t num_keys = std::min(kTile, end - tile_begin);
      for (size_t j = 0; j < num_keys; j += 4) {
        const size_t count = std::min<size_t>(4, num_keys - j);
        const size_t at = (tile_begin + j) * padded;
        multiply_add(Product{ds + j, 1, kTile, q, padded, dk + at, padded, true}, count, 0, rows,
                     padded);
        multiply_add(Product{p + j, 1, kTile, dout, padded, dv + at, padded, true}, count, 0, rows,
                     padded);
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      narrow_row_any(dtype, dq + r * padded, width,
                     element(args.dq, first + r / group, first_head + r % group));
    }
  }
  for (size_t t = 0; t < length; ++t) {
    const auto head = static_cast<size_t>(item.kv_head);
    narrow_row_any(dtype, dk + t * padded, width, element(args.dk, t, head));
    narrow_row_any(dtype, dv + t * padded, width, element(args.dv, t, head));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#endif
