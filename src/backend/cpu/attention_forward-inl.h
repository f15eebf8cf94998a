// The forward kernel of attention, once per instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/attention_tile-inl.h"

#if defined(OCTET_BACKEND_CPU_ATTENTION_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_ATTENTION_FORWARD_INL_H_
#undef OCTET_BACKEND_CPU_ATTENTION_FORWARD_INL_H_
#else
#define OCTET_BACKEND_CPU_ATTENTION_FORWARD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

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
  const auto group = static_cast<size_t>(args.q.shape[1] / args.cache.num_heads());
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
    load_values(args.cache, item, tile_begin, begin, end, values);
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

}  // namespace HWY_NAMESPACE
}  // namespace octet::cpu
HWY_AFTER_NAMESPACE();

#endif
