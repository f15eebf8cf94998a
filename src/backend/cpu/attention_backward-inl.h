// The backward kernel of attention, once per instruction set.
#include <algorithm>
#include <cstring>

#include "backend/cpu/attention_tile-inl.h"

#if defined(OCTET_BACKEND_CPU_ATTENTION_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTET_BACKEND_CPU_ATTENTION_BACKWARD_INL_H_
#undef OCTET_BACKEND_CPU_ATTENTION_BACKWARD_INL_H_
#else
#define OCTET_BACKEND_CPU_ATTENTION_BACKWARD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace octet::cpu {
namespace HWY_NAMESPACE {

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
  const auto group = static_cast<size_t>(args.q.shape[1] / args.cache.num_heads());
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
      load_values(args.cache, item, tile_begin, begin, end, values);
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
