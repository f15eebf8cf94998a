#include "backend/cpu/dispatch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attention.cpp"  // NOLINT
#include <algorithm>
#include <cstring>
#include <limits>

#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/attention_backward-inl.h"
#include "backend/cpu/attention_forward-inl.h"
#include "backend/cpu/op_util.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/quantize_rows.h"

#if HWY_ONCE
namespace octet::cpu {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr auto kMaxWidth = static_cast<int64_t>(kMaxHeadWidth);

void check_cache(std::string_view op, const ops::KvCacheView& cache) {
  require_rank(op, "cache.k", cache.k, 4, 4);
  require_shape(op, "cache.v", cache.v, cache.k.shape);
  require_dtype(op, "cache.v", cache.v, cache.k.dtype);
  const DType dtype = cache.k.dtype;
  if (dtype != DType::kBF16 && dtype != DType::kF32 && dtype != DType::kE4M3) {
    fail(op, "the cache must be BF16, F32 or E4M3, but is {}", tensor::dtype_name(dtype));
  }
  if (dtype == DType::kE4M3) {
    if (cache.page_size() % ops::kValueBlock != 0) {
      fail(op, "pages of E4M3 must have a multiple of {} tokens, but have {}", ops::kValueBlock,
           cache.page_size());
    }
    const Shape shape{cache.k.shape[0], cache.k.shape[1], cache.k.shape[2]};
    for (const TensorView* scales : {&cache.k_scale, &cache.v_scale}) {
      const char* name = scales == &cache.k_scale ? "cache.k_scale" : "cache.v_scale";
      require_shape(op, name, *scales, shape);
      require_dtype(op, name, *scales, DType::kF32);
    }
  }
  const int64_t width = cache.k.shape[3];
  if (cache.num_heads() < 1 || cache.page_size() < 1 || width < 2 || width > kMaxWidth ||
      width % 2 != 0) {
    fail(op, "the cache must have pages, heads and an even head width up to {}, but is {}",
         kMaxWidth, cache.k.shape.to_string());
  }
}

// q-like [T, H, D] of one dtype.
void check_heads(std::string_view op, std::string_view name, const TensorView& view, DType dtype,
                 const Shape& shape) {
  require_shape(op, name, view, shape);
  require_dtype(op, name, view, dtype);
}

void check_query(std::string_view op, const TensorView& q, const ops::KvCacheView& cache) {
  check_cache(op, cache);
  require_rank(op, "q", q, 3, 3);
  require_float(op, "q", q);
  const int64_t num_heads = q.shape[1], kv_heads = cache.num_heads();
  if (num_heads < 1 || num_heads % kv_heads != 0 || q.shape[2] != cache.k.shape[3]) {
    fail(op, "q {} does not fit {} key/value heads of width {}", q.shape.to_string(), kv_heads,
         cache.k.shape[3]);
  }
}

void check_batch(std::string_view op, const ops::AttentionBatch& batch, int64_t num_tokens,
                 const ops::KvCacheView& cache, int64_t window) {
  require_rank(op, "page_table", batch.page_table, 2, 2);
  require_dtype(op, "page_table", batch.page_table, DType::kI32);
  const int64_t num_sequences = batch.page_table.shape[0];
  const int64_t max_pages = batch.page_table.shape[1];
  require_vector(op, "query_offsets", batch.query_offsets, DType::kI32, num_sequences + 1);
  require_vector(op, "context_lengths", batch.context_lengths, DType::kI32, num_sequences);
  require_contiguous(op, "query_offsets", batch.query_offsets);
  require_contiguous(op, "context_lengths", batch.context_lengths);
  const int32_t* offsets = batch.query_offsets.as<int32_t>();
  if (offsets[0] < 0 || offsets[num_sequences] > num_tokens) {
    fail(op, "query_offsets must lie in [0, {}], but run from {} to {}", num_tokens, offsets[0],
         offsets[num_sequences]);
  }
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t new_tokens = int64_t{offsets[s + 1]} - offsets[s];
    const int64_t length = batch.context_lengths.as<int32_t>()[s];
    if (length == 0 && new_tokens >= 0) continue;
    if (new_tokens < 0 || length < new_tokens) {
      fail(op, "sequence {} has {} new tokens in a context of {}", s, new_tokens, length);
    }
    if (new_tokens == 0) continue;
    const int64_t first = window > 0 ? std::max<int64_t>(0, length - new_tokens + 1 - window) : 0;
    for (int64_t i = first / cache.page_size(); i * cache.page_size() < length; ++i) {
      const int64_t page = i < max_pages ? batch.page_table.row<int32_t>(s)[i] : -1;
      if (page < 0 || page >= cache.k.shape[0]) {
        fail(op, "position {} of sequence {} needs page {} of its table, which is {} of {}",
             i * cache.page_size(), s, i, page, cache.k.shape[0]);
      }
    }
  }
  if (batch.max_shared_pages == 0) return;
  // What is said to be shared is not used here, but must be so.
  require_vector(op, "shared_first", batch.shared_first, DType::kI32, num_sequences);
  require_vector(op, "shared_pages", batch.shared_pages, DType::kI32, num_sequences);
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t first = *batch.shared_first.row<int32_t>(s);
    const int64_t shared = *batch.shared_pages.row<int32_t>(s);
    const int64_t full = batch.context_lengths.as<int32_t>()[s] / cache.page_size();
    const bool in_run =
        first >= 0 && first <= s && *batch.shared_first.row<int32_t>(first) == first;
    if (!in_run || shared < 0 || shared > std::min(full, batch.max_shared_pages) ||
        shared != *batch.shared_pages.row<int32_t>(first) ||
        !std::equal(batch.page_table.row<int32_t>(s), batch.page_table.row<int32_t>(s) + shared,
                    batch.page_table.row<int32_t>(first))) {
      fail(op, "sequence {} must begin with the {} full pages of sequence {}, but does not", s,
           shared, first);
    }
  }
}

// One head of a token by the one quantiser; values [width] into `codes`. Returns the scale, which
// is NaN where a code was; that becomes 0.
float quantize_head(const CodecKernels& codec, const float* values, int64_t width, uint8_t* codes,
                    ops::QuantizeCounters& counters) {
  float scale = scale_of(codec.largest(values, width), DType::kE4M3, tensor::ScaleFormat::kF32);
  codec.encode(values, width, scale, DType::kE4M3, codes, counters);
  for (int64_t i = 0; i < width; ++i) {
    if ((codes[i] & 0x7F) != 0x7F) continue;
    codes[i] = 0;
    scale = std::numeric_limits<float>::quiet_NaN();
  }
  return scale;
}

// All heads of one token of k or v into a slot; E4M3 with a scale per head, values in blocks.
void append_token(const CodecKernels& codec, const TensorView& x, int64_t token,
                  const TensorView& cache, const TensorView& scales, bool is_key, int64_t slot,
                  ops::QuantizeCounters& counters) {
  const int64_t num_heads = cache.shape[1], page_size = cache.shape[2], width = cache.shape[3];
  const int64_t page = slot / page_size, offset = slot % page_size;
  float values[kMaxHeadWidth];
  for (int64_t g = 0; g < num_heads; ++g) {
    const int64_t row = g * page_size + offset;
    const int64_t at = page * cache.row_stride + row * width;
    if (cache.dtype == DType::kF32) {
      load_row(codec, x, token, g * width, width, cache.as<float>() + at);
    } else if (cache.dtype == DType::kBF16) {
      load_row(codec, x, token, g * width, width, values);
      codec.f32_to_bf16(values, width, cache.as<uint16_t>() + at);
    } else {
      load_row_as_bf16(codec, x, token, g * width, width, values);
      uint8_t codes[kMaxHeadWidth];
      uint8_t* to = is_key ? cache.as<uint8_t>() + at : codes;
      scales.row<float>(page)[row] = quantize_head(codec, values, width, to, counters);
      if (is_key) continue;
      to = cache.as<uint8_t>() + page * cache.row_stride + g * page_size * width;
      for (int64_t d = 0; d < width; ++d) to[ops::value_index(offset, d, width)] = codes[d];
    }
  }
}

}  // namespace

void kv_append(Context& context, const ops::KvAppendArgs& args) {
  constexpr std::string_view kOp = "kv_append";
  check_cache(kOp, args.cache);
  const int64_t num_tokens = args.k.rows();
  const Shape shape{num_tokens, args.cache.num_heads(), args.cache.k.shape[3]};
  require_shape(kOp, "k", args.k, shape);
  require_float(kOp, "k", args.k);
  check_heads(kOp, "v", args.v, args.k.dtype, shape);
  require_vector(kOp, "slots", args.slots, DType::kI32, num_tokens);
  const int64_t num_slots = args.cache.k.shape[0] * args.cache.page_size();
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t slot = *args.slots.row<int32_t>(t);
    if (slot < -1 || slot >= num_slots) {
      fail(kOp, "slot {} of token {} is not in [-1, {})", slot, t, num_slots);
    }
  }
  const CodecKernels& codec = codec_kernels(context.isa);
  parallel(context, num_tokens, 4 * args.k.row_elements(), [&](int64_t begin, int64_t end, int) {
    ops::QuantizeCounters counters;
    for (int64_t t = begin; t < end; ++t) {
      const int32_t slot = *args.slots.row<int32_t>(t);
      if (slot < 0) continue;
      append_token(codec, args.k, t, args.cache.k, args.cache.k_scale, true, slot, counters);
      append_token(codec, args.v, t, args.cache.v, args.cache.v_scale, false, slot, counters);
    }
    add_counters(context.counters, counters);
  });
}

void kv_copy(Context&, const ops::KvCopyArgs& args) {
  constexpr std::string_view kOp = "kv_copy";
  check_cache(kOp, args.cache);
  const int64_t num_pages = args.cache.k.shape[0];
  for (const ops::KvPageCopy& copy : args.copies) {
    for (const int32_t page : {copy.source, copy.destination}) {
      if (page < 0 || page >= num_pages) fail(kOp, "page {} is not in [0, {})", page, num_pages);
    }
    if (copy.num_tokens < 0 || copy.num_tokens > args.cache.page_size()) {
      fail(kOp, "num_tokens must be in [0, {}], but is {}", args.cache.page_size(),
           copy.num_tokens);
    }
  }
  const bool quantized = args.cache.k.dtype == DType::kE4M3;
  for (const TensorView* view :
       {&args.cache.k, &args.cache.v, &args.cache.k_scale, &args.cache.v_scale}) {
    if (!quantized && (view == &args.cache.k_scale || view == &args.cache.v_scale)) continue;
    const int64_t head_bytes =
        view->row_elements() / args.cache.num_heads() * tensor::dtype_bytes(view->dtype);
    const int64_t step = quantized && view == &args.cache.v ? ops::kValueBlock : 1;
    for (const ops::KvPageCopy& copy : args.copies) {
      const int64_t num_tokens = divide_up(copy.num_tokens, step) * step;
      const int64_t copied = head_bytes / args.cache.page_size() * num_tokens;
      auto* to = static_cast<char*>(row_at(*view, copy.destination));
      const auto* from = static_cast<const char*>(row_at(*view, copy.source));
      if (to == from) continue;
      for (int64_t at = 0; at < args.cache.num_heads() * head_bytes; at += head_bytes) {
        std::memcpy(to + at, from + at, static_cast<size_t>(copied));
      }
    }
  }
}

void attention(Context& context, const ops::AttentionArgs& args) {
  constexpr std::string_view kOp = "attention";
  check_query(kOp, args.q, args.cache);
  check_heads(kOp, "out", args.out, args.q.dtype, args.q.shape);
  const int64_t num_tokens = args.q.shape[0], num_heads = args.q.shape[1];
  if (!args.lse.empty()) {
    check_heads(kOp, "lse", args.lse, DType::kF32, Shape{num_tokens, num_heads});
  }
  check_batch(kOp, args.batch, num_tokens, args.cache, args.window);

  // Items: blocks of query tokens, of every sequence, times key/value heads. How a block is cut
  // has no part in the bytes.
  const int64_t kv_heads = args.cache.num_heads(), width = args.q.shape[2];
  const int64_t group = num_heads / kv_heads;
  const int64_t block = std::clamp<int64_t>(64 / group, 1, 32);
  const int64_t num_sequences = args.batch.page_table.shape[0];
  const int32_t* offsets = args.batch.query_offsets.as<int32_t>();
  const int32_t* lengths = args.batch.context_lengths.as<int32_t>();
  int64_t* first_block = context.shared_scratch[0].take<int64_t>(num_sequences + 1);
  int64_t num_scores = 0;
  first_block[0] = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t new_tokens = offsets[s + 1] - offsets[s];
    first_block[s + 1] = first_block[s];
    if (lengths[s] == 0) {
      for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
        std::memset(row_at(args.out, t), 0,
                    static_cast<size_t>(args.out.row_elements() * dtype_bytes(args.out.dtype)));
      }
      continue;
    }
    first_block[s + 1] += (new_tokens + block - 1) / block;
    num_scores += new_tokens * lengths[s];
  }
  const int64_t num_items = first_block[num_sequences] * kv_heads;
  if (num_items == 0) return;
  const auto attention_item = OCTET_CPU_KERNEL(context.isa, attention_item);
  const auto scratch_floats = static_cast<int64_t>(
      forward_scratch(static_cast<size_t>(group * block), static_cast<size_t>(width)));
  parallel(context, num_items, num_scores * num_heads * width / num_items,
           [&](int64_t begin, int64_t end, int thread) {
             float* scratch =
                 context.thread_scratch[static_cast<size_t>(thread)].take<float>(scratch_floats);
             for (int64_t i = begin; i < end; ++i) {
               const int64_t index = i / kv_heads;
               const int64_t s = std::upper_bound(first_block, first_block + num_sequences, index) -
                                 first_block - 1;
               const int64_t done = (index - first_block[s]) * block;
               const int64_t new_tokens = offsets[s + 1] - offsets[s];
               attention_item(args,
                              AttentionItem{.pages = args.batch.page_table.row<int32_t>(s),
                                            .first_token = offsets[s] + done,
                                            .num_tokens = std::min(block, new_tokens - done),
                                            .first_position = lengths[s] - new_tokens + done,
                                            .kv_head = i % kv_heads},
                              scratch);
             }
           });
}

void attention_backward(Context& context, const ops::AttentionBackwardArgs& args) {
  constexpr std::string_view kOp = "attention_backward";
  check_query(kOp, args.q, args.cache);
  const int64_t num_tokens = args.q.shape[0], num_heads = args.q.shape[1], width = args.q.shape[2];
  const int64_t kv_heads = args.cache.num_heads();
  const DType dtype = args.q.dtype;
  check_heads(kOp, "out", args.out, dtype, args.q.shape);
  check_heads(kOp, "dout", args.dout, dtype, args.q.shape);
  check_heads(kOp, "dq", args.dq, dtype, args.q.shape);
  check_heads(kOp, "dk", args.dk, dtype, Shape{num_tokens, kv_heads, width});
  check_heads(kOp, "dv", args.dv, dtype, Shape{num_tokens, kv_heads, width});
  check_heads(kOp, "lse", args.lse, DType::kF32, Shape{num_tokens, num_heads});
  check_batch(kOp, args.batch, num_tokens, args.cache, 0);
  const int64_t num_sequences = args.batch.page_table.shape[0];
  const int32_t* offsets = args.batch.query_offsets.as<int32_t>();
  const int32_t* lengths = args.batch.context_lengths.as<int32_t>();
  int64_t longest = 0, num_scores = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t new_tokens = offsets[s + 1] - offsets[s];
    if (lengths[s] != new_tokens) {
      fail(kOp, "every key must be one of the batch's tokens, but sequence {} has {} of {}", s,
           new_tokens, lengths[s]);
    }
    longest = std::max(longest, new_tokens);
    num_scores += new_tokens * new_tokens;
  }
  const int64_t num_items = num_sequences * kv_heads;
  if (num_items == 0) return;

  const int64_t group = num_heads / kv_heads;
  const int64_t block = std::clamp<int64_t>(64 / group, 1, 64);
  const auto attention_backward_item = OCTET_CPU_KERNEL(context.isa, attention_backward_item);
  const auto scratch_floats = static_cast<int64_t>(
      backward_scratch(static_cast<size_t>(group * block), static_cast<size_t>(width),
                       static_cast<size_t>(longest)));
  parallel(context, num_items, 4 * num_scores * num_heads * width / num_items,
           [&](int64_t begin, int64_t end, int thread) {
             float* scratch =
                 context.thread_scratch[static_cast<size_t>(thread)].take<float>(scratch_floats);
             for (int64_t i = begin; i < end; ++i) {
               const int64_t s = i / kv_heads;
               attention_backward_item(args,
                                       AttentionItem{.pages = args.batch.page_table.row<int32_t>(s),
                                                     .first_token = offsets[s],
                                                     .num_tokens = offsets[s + 1] - offsets[s],
                                                     .first_position = 0,
                                                     .kv_head = i % kv_heads},
                                       block, scratch);
             }
           });
}

}  // namespace octet::cpu
#endif  // HWY_ONCE
