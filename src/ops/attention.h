// Causal attention over a paged key/value cache: one op for prefill, decode, scoring and training.
// T new tokens of S sequences, H query heads, G key/value heads (H a multiple of G; query head h
// reads head h / (H / G)), D head width, P tokens per page.
#pragma once

#include <span>

#include "ops/quantize.h"
#include "tensor/tensor.h"

namespace octet::ops {

// E4M3 values of a page's head lie in blocks of 16 tokens, each [D][16]: the matrix units want a
// head element's tokens side by side. Token i of a block stands at place value_place(i) of its 16,
// which is the order in which a lane holds the scores of a tile.
inline constexpr int64_t kValueBlock = 16;
constexpr int64_t value_place(int64_t token) {
  return token / 2 % 4 * 4 + token / 8 % 2 * 2 + token % 2;
}
// Where element d of a page's token lies among its head's P × D elements.
constexpr int64_t value_index(int64_t token, int64_t d, int64_t width) {
  return (token / kValueBlock * width + d) * kValueBlock + value_place(token % kValueBlock);
}

// One layer's pages. k, v [num_pages, G, P, D] in BF16, F32 or E4M3: a head's tokens of a page lie
// side by side; for E4M3 k_scale, v_scale [num_pages, G, P] F32 (per token and head, from its own
// amax, by the one quantiser), P is a multiple of kValueBlock, and v lies as value_index says. No
// E4M3 code of a cache is NaN: a token's head with a NaN has NaN for its scale, and 0 for the code
// of the NaN.
struct KvCacheView {
  tensor::TensorView k, v;
  tensor::TensorView k_scale, v_scale;

  int64_t num_heads() const { return k.shape[1]; }
  int64_t page_size() const { return k.shape[2]; }
};

// Writes k, v [T, G, D] (BF16|F32, first axis may be strided) of token t to slot slots[t] =
// page × P + offset (I32; −1: nowhere), quantising where the cache is E4M3.
struct KvAppendArgs {
  tensor::TensorView k, v;
  tensor::TensorView slots;
  KvCacheView cache;
};

// From the projections of T tokens to attention's operands: q and k are normed over each head (RMS;
// without weights: not), rotated (ops/rope.h), and k and v appended. qkv [T, (H + 2 G) D] has q, k
// and v side by side; q_out [T, H, D], k_out [T, G, D]; every step rounds to their dtype.
struct AttentionInputsArgs {
  tensor::TensorView qkv;
  tensor::TensorView q_norm, k_norm;  // [D], or both empty
  tensor::TensorView positions;       // [T] I32
  tensor::TensorView rope_table;      // [P, D] F32
  tensor::TensorView slots;           // [T] I32
  tensor::TensorView q_out, k_out;
  KvCacheView cache;
  float eps = 1e-6f;
  bool keep_k = true;  // false: k_out may be left unwritten
};

// The first `num_tokens` tokens of page `source` go to page `destination`; E4M3 values in whole
// blocks.
struct KvPageCopy {
  int32_t source = 0;
  int32_t destination = 0;
  int32_t num_tokens = 0;
};

// No destination is another copy's source or destination.
struct KvCopyArgs {
  KvCacheView cache;
  std::span<const KvPageCopy> copies;  // host
};

// Which tokens see what. Token t of sequence s (query_offsets[s] ≤ t < query_offsets[s+1]) stands
// at position context_lengths[s] − (query_offsets[s+1] − t) and sees positions 0 … its own, or with
// window w > 0 only the last w of them. Position p of s lies in page page_table[s, p / P]. A
// sequence with context_lengths[s] = 0 fills up the batch: its rows of `out` are zeros.
struct AttentionBatch {
  tensor::TensorView query_offsets;    // [S + 1] I32
  tensor::TensorView context_lengths;  // [S] I32
  tensor::TensorView page_table;       // [S, max_pages] I32
  // What the caller knows of the above, so that a backend need not fetch it; 0: nothing.
  int64_t max_query_tokens = 0;  // of one sequence, at most
  int64_t max_context = 0;       // the longest context, at most
  // Runs of neighbouring sequences that begin with the same pages, [S] I32 or empty: the first
  // sequence of the run that each belongs to, and how many leading full pages all of the run have
  // in common (0: none). Those may be read once for the run; the bytes are the same.
  tensor::TensorView shared_first{};
  tensor::TensorView shared_pages{};
  int64_t max_shared_pages = 0;  // of one sequence, at most
  int64_t min_query_tokens = 0;  // of one sequence, at least
};

// out[t, h] = Σ_p softmax_p(scale · q[t, h] · k[p]) v[p], F32 inside, rounded once.
// Positions are walked in tiles of a fixed size from position 0 up (kAttentionTile; on a device
// larger ones too), whatever the query's length, page or batch: each tile's maximum, sum and
// weighted values are folded in order. So a row's bytes depend on its own sequence alone. A row
// that sees nothing gives zeros on a device. q, out [T, H, D] BF16|F32 (first axis may be strided);
// lse [T, H] F32: log Σ exp(scale q·k), or empty. `quantized` takes out as [T, H · D].
struct AttentionArgs {
  tensor::TensorView q;
  KvCacheView cache;
  AttentionBatch batch;
  tensor::TensorView out;
  tensor::TensorView lse;
  float scale = 1.0f;
  int64_t window = 0;
  QuantizedOutput quantized{};
};
inline constexpr int64_t kAttentionTile = 64;

// The gradient where every key is one of the batch's own tokens (context_lengths[s] = the
// sequence's new tokens): dq [T, H, D], dk, dv [T, G, D] in q's dtype; first axes may be strided.
// The keys and values are the cache's decoded ones; quantisation passes the gradient through
// unchanged. Query heads of a group and query positions add up in F32 in their order.
struct AttentionBackwardArgs {
  tensor::TensorView q;
  KvCacheView cache;
  AttentionBatch batch;
  tensor::TensorView out;
  tensor::TensorView lse;
  tensor::TensorView dout;
  tensor::TensorView dq, dk, dv;
  float scale = 1.0f;
  int64_t window = 0;
};

}  // namespace octet::ops
