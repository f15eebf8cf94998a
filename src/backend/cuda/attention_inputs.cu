// From the projections to attention's operands in one kernel: the norm of each head of q and k, the
// rotation, and keys and values into their pages.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_quantizer.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/fused.h"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/launch.cuh"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr unsigned kMostThreads = 256;

struct HeadRows {
  Bf16* data;  // [T, heads, D]; may be null
  int64_t stride;
};
struct Pages {
  void* data;
  int64_t stride;
  float* scales;  // null: BF16
  int64_t scale_stride;
};

struct AttentionInputs {
  const Bf16* qkv;
  int64_t qkv_stride;
  const Bf16 *q_norm, *k_norm;  // or both null
  const int32_t *positions, *slots;
  const float* table;
  int64_t table_stride;
  int num_positions;
  HeadRows q_out, k_out;
  Pages k_pages, v_pages;
  int num_tokens, num_slots, page_size;
  bool blocks_apart;  // values that fill blocks of pages are value_blocks_kernel's
  int q_heads, kv_heads, width;
  float inverse_width, eps;
  DeviceCounters* counters;
};

// Cosines and sines of these eight of a head; the sines' sign is that of their products.
struct Turn {
  float cosines[8], sines[8];
};
__device__ Turn turn_of(const float* row, int column, int half) {
  const bool is_high = column >= half;
  const float* at = row + (is_high ? column - half : column);
  Turn turn;
  load_vector(at, turn.cosines);
  load_vector(at + half, turn.sines);
#pragma unroll
  for (float& sine : turn.sines) sine = is_high ? sine : -sine;
  return turn;
}
__device__ uint4 rotated8(const uint4& pairs, const uint4& partner, const Turn& turn) {
  float own[8], other[8];
  unpack8(pairs, own);
  unpack8(partner, other);
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i] = own[i] * turn.cosines[i] + other[i] * turn.sines[i];
  return pack8(own);
}

// Four codes with 0 for each NaN.
__device__ uint32_t without_nan(uint32_t codes) {
  const uint32_t is_nan = ((codes & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101;
  return codes & ~(is_nan * 0xFF);
}

// One head of a token, of which each of kLanes lanes has eight values: its scale (with a NaN among
// them NaN) and this lane's codes. Empty and not counted unless `is_own`; the whole warp calls.
struct HeadCodes {
  float scale = 0;
  uint2 codes = make_uint2(0, 0);
};
template <int kLanes>
__device__ HeadCodes encode_head(const uint4& values, bool is_own, RowEncoder<false>& encoder) {
  const int first = static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes;
  uint32_t bits = join_halves(largest_of(values));
  bool has_nan = false;
  if (__any_sync(kAllLanes, bits >= kBf16Infinity)) {
    const unsigned lanes = __ballot_sync(kAllLanes, bits > kBf16Infinity);
    has_nan = (lanes >> first & (kAllLanes >> (32 - kLanes))) != 0;
    bits = largest_finite_of(values);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
  }
  HeadCodes head;
  if (!is_own) return head;
  head.scale = scale_of<false>(__uint_as_float(bits << 16), false);
  encoder.set_scale(head.scale);
  head.codes = encoder.encode(values);
  if (has_nan) {
    head.scale = kNaN;
    head.codes = make_uint2(without_nan(head.codes.x), without_nan(head.codes.y));
  }
  return head;
}

constexpr int kBlockTokens = static_cast<int>(ops::kValueBlock);

// Whether the tokens from `first` on stand in the slots from `slot` on, which begins a block of
// values, and fill it; the whole warp calls.
__device__ bool fills_block(const AttentionInputs& args, int first, int slot) {
  const int i = static_cast<int>(threadIdx.x) % kBlockTokens;
  const bool here = slot >= 0 && slot < args.num_slots && first >= 0 &&
                    first + i < args.num_tokens && args.slots[first + i] == slot + i;
  return __all_sync(kAllLanes, here);
}

// The blocks of one x take a token, kLanes neighbouring lanes one of its heads at a time, eight
// elements each; heads of q, k and v stand in this order. The lanes of a warp stay together: those
// without a head work on zeros.
template <int kLanes, bool kQuantized>
__global__ void __launch_bounds__(kMostThreads, 3)
    attention_inputs_kernel(const AttentionInputs args) {
  await_predecessor();
  const int64_t token = blockIdx.x;
  const int groups = static_cast<int>(blockDim.x) / kLanes, step = groups * gridDim.y;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = 8 * lane;
  const int half = args.width / 2, partner = column < half ? lane + half / 8 : lane - half / 8;
  const int k_begin = args.q_heads, v_begin = k_begin + args.kv_heads;
  const int end = column < args.width ? v_begin + args.kv_heads : 0;  // of this lane's heads
  const Bf16* qkv = args.qkv + token * args.qkv_stride + column;
  int head = static_cast<int>(blockIdx.y) * groups + static_cast<int>(threadIdx.x) / kLanes;
  const auto load_head = [&](int index) {
    return index < end ? load8(qkv + index * args.width) : make_uint4(0, 0, 0, 0);
  };
  uint4 pairs = load_head(head);
  const int position = args.positions[token], slot = args.slots[token];
  const bool appends = slot >= 0 && slot < args.num_slots;
  Turn turn{};
  if (end > 0 && position >= 0 && position < args.num_positions) {
    turn = turn_of(args.table + position * args.table_stride, column, half);
  }

  // Norm and rotation; all lanes of the warp take part.
  const bool norms = args.q_norm != nullptr;
  const auto turned = [&](const uint4& weights) {
    uint4 own = pairs;
    if (norms) {
      const float squares = lanes_sum<kLanes>(add_squares(own, 0));
      own = normed8(own, weights, inverse_rms(squares, args.inverse_width, args.eps), 0.0f);
    }
    return rotated8(own,
                    make_uint4(__shfl_sync(kAllLanes, own.x, partner, kLanes),
                               __shfl_sync(kAllLanes, own.y, partner, kLanes),
                               __shfl_sync(kAllLanes, own.z, partner, kLanes),
                               __shfl_sync(kAllLanes, own.w, partner, kLanes)),
                    turn);
  };
  RowEncoder<false> encoder;
  const auto append = [&](const uint4& values, const Pages& pages, int kv_head, bool is_own,
                          auto is_key) {
    const int page = slot / args.page_size;
    const int row = kv_head * args.page_size + slot % args.page_size;
    const int64_t at = page * pages.stride + row * args.width + column;
    const bool writes = is_own && appends;
    if constexpr (kQuantized) {
      const HeadCodes head = encode_head<kLanes>(values, writes, encoder);
      auto* to = static_cast<uint8_t*>(pages.data);
      if (writes && lane == 0) pages.scales[page * pages.scale_stride + row] = head.scale;
      if constexpr (is_key) {
        if (writes) *reinterpret_cast<uint2*>(to + at) = head.codes;
      } else {
        // Two lanes share their sixteen elements: at once they write neighbours.
        const uint2 other = make_uint2(__shfl_xor_sync(kAllLanes, head.codes.x, 1),
                                       __shfl_xor_sync(kAllLanes, head.codes.y, 1));
        const int odd = lane % 2, token_of_page = slot % args.page_size;
        const uint2 low = odd != 0 ? other : head.codes, high = odd != 0 ? head.codes : other;
        const uint32_t words[4] = {low.x, low.y, high.x, high.y};
        to += at - column - token_of_page * args.width;
        if (writes) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int element = column - 8 * odd + 2 * i + odd;
            to[ops::value_index(token_of_page, element, args.width)] =
                static_cast<uint8_t>(words[i / 2] >> 8 * (2 * i % 4 + odd));
          }
        }
      }
    } else if (writes) {
      store8(values, static_cast<Bf16*>(pages.data) + at);
    }
  };
  // Calls body(is_own) as long as a group of the warp has a head before `bound`, and goes on to its
  // next head, which is on its way meanwhile.
  const auto for_heads = [&](int bound, const auto& body) {
    while (__any_sync(kAllLanes, head < bound)) {
      const uint4 next = load_head(head + step);
      body(head < bound && head < end);
      if (head < bound) {
        head += step;
        pairs = next;
      }
    }
  };

  uint4 weights = make_uint4(0, 0, 0, 0);
  if (norms && end > 0) weights = load8(args.q_norm + column);
  Bf16* q_out = args.q_out.data + token * args.q_out.stride + column;
  for_heads(k_begin, [&](bool is_own) {
    const uint4 q = turned(weights);
    if (is_own) store8(q, q_out + head * args.width);
  });
  if (norms && end > 0) weights = load8(args.k_norm + column);
  for_heads(v_begin, [&](bool is_own) {
    const uint4 k = turned(weights);
    if (is_own && args.k_out.data != nullptr) {
      store8(k,
             args.k_out.data + token * args.k_out.stride + (head - k_begin) * args.width + column);
    }
    append(k, args.k_pages, head - k_begin, is_own, std::true_type());
  });
  const int place = slot % kBlockTokens;
  if (!kQuantized || !args.blocks_apart ||
      !fills_block(args, static_cast<int>(token) - place, slot - place)) {
    for_heads(v_begin + args.kv_heads, [&](bool is_own) {
      append(pairs, args.v_pages, head - v_begin, is_own, std::false_type());
    });
  }

  if constexpr (kQuantized) {
    add_counts(encoder, args.counters);
    if (blockIdx.y == 0 && threadIdx.x == 0 && appends) {
      atomicAdd(&args.counters->elements,
                static_cast<unsigned long long>(2 * args.kv_heads * args.width));
    }
  }
}

// The values of the tokens that fill a block of a page, of one head: the block of one x looks for
// them among those that begin with one of its 16 tokens.
constexpr int kBlockThreads = 128;

template <int kLanes>
__global__ void __launch_bounds__(kBlockThreads) value_blocks_kernel(const AttentionInputs args) {
  __shared__ __align__(16) uint8_t codes[kBlockTokens][8 * kLanes];
  await_predecessor();
  const int begin = static_cast<int>(blockIdx.x) * kBlockTokens, head = blockIdx.y;
  const int own = begin + static_cast<int>(threadIdx.x) % kBlockTokens;
  unsigned firsts =
      __ballot_sync(kAllLanes, own < args.num_tokens && args.slots[own] % kBlockTokens == 0);
  firsts &= (1u << kBlockTokens) - 1;
  int first = -1, slot = -1;  // at most one fills its block
  while (firsts != 0 && first < 0) {
    const int candidate = begin + __ffs(static_cast<int>(firsts)) - 1;
    slot = args.slots[candidate];
    if (fills_block(args, candidate, slot)) first = candidate;
    firsts &= firsts - 1;
  }
  if (first < 0) return;

  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = 8 * lane;
  const int page = slot / args.page_size, row = head * args.page_size + slot % args.page_size;
  const Bf16* from = args.qkv + (args.q_heads + args.kv_heads + head) * args.width + column;
  RowEncoder<false> encoder;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < kBlockTokens;
       i += kBlockThreads / kLanes) {
    const bool is_own = column < args.width;
    const uint4 values =
        is_own ? load8(from + (first + i) * args.qkv_stride) : make_uint4(0, 0, 0, 0);
    const HeadCodes of = encode_head<kLanes>(values, is_own, encoder);
    *reinterpret_cast<uint2*>(&codes[ops::value_place(i)][column]) = of.codes;
    if (lane == 0) args.v_pages.scales[page * args.v_pages.scale_stride + row + i] = of.scale;
  }
  __syncthreads();
  auto* to = static_cast<uint8_t*>(args.v_pages.data) + page * args.v_pages.stride +
             int64_t{row} * args.width;
  for (int element = threadIdx.x; element < args.width; element += kBlockThreads) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kBlockTokens; ++i) {
      words[i / 4] |= uint32_t{codes[i][element]} << 8 * (i % 4);
    }
    *reinterpret_cast<uint4*>(to + element * kBlockTokens) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  add_counts(encoder, args.counters);
}

bool is_vector(const TensorView& view, DType dtype, int64_t count) {
  return view.shape == Shape{count} && view.dtype == dtype && view.row_stride == 1 &&
         view.data != nullptr && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

bool is_rows(const TensorView& view, const Shape& shape, DType dtype, int64_t width) {
  return view.shape == shape && view.dtype == dtype && view.data != nullptr &&
         takes_vectors(view, width, 8);
}

bool suits(const ops::AttentionInputsArgs& args) {
  if (args.q_out.shape.rank() != 3 || args.k_out.shape.rank() != 3 || args.qkv.rows() == 0) {
    return false;
  }
  const int64_t num_tokens = args.qkv.rows(), q_heads = args.q_out.shape[1];
  const Shape& cache = args.cache.k.shape;
  const int64_t kv_heads = args.cache.num_heads(), width = cache[3];
  const bool quantized = args.cache.k.dtype == DType::kE4M3;
  return width % 16 == 0 && (quantized || args.cache.k.dtype == DType::kBF16) &&
         is_rows(args.qkv, Shape{num_tokens, (q_heads + 2 * kv_heads) * width}, DType::kBF16,
                 width) &&
         is_rows(args.q_out, Shape{num_tokens, q_heads, width}, DType::kBF16, width) &&
         is_rows(args.k_out, Shape{num_tokens, kv_heads, width}, DType::kBF16, width) &&
         is_rows(args.rope_table, Shape{args.rope_table.rows(), width}, DType::kF32, width / 2) &&
         args.q_norm.empty() == args.k_norm.empty() &&
         (args.q_norm.empty() || (is_vector(args.q_norm, DType::kBF16, width) &&
                                  is_vector(args.k_norm, DType::kBF16, width))) &&
         is_vector(args.positions, DType::kI32, num_tokens) &&
         is_vector(args.slots, DType::kI32, num_tokens) && takes_vectors(args.cache.k, width, 8) &&
         takes_vectors(args.cache.v, width, 8);
}

HeadRows rows_of(const TensorView& view) { return {view.as<Bf16>(), view.row_stride}; }
Pages pages_of(const TensorView& data, const TensorView& scales) {
  return {data.data, data.row_stride, scales.as<float>(), scales.row_stride};
}

// As few heads to a group of lanes as let all groups be resident at once; of many tokens each is
// one small block's, and values that fill blocks of pages go by themselves: single bytes take long.
template <int kLanes>
void launch_lanes(Context& context, AttentionInputs& inputs, bool quantized) {
  const int64_t heads = inputs.q_heads + 2 * inputs.kv_heads;
  const int64_t resident = int64_t{3 * kMostThreads} * context.num_multiprocessors() / kLanes;
  inputs.blocks_apart = quantized && inputs.num_tokens >= 8 * context.num_multiprocessors();
  const int64_t heads_of_group = divide_up(inputs.num_tokens * heads, resident);
  const int64_t all_threads = std::max<int64_t>(128, divide_up(heads, heads_of_group) * kLanes);
  const int64_t parts = divide_up(all_threads, kMostThreads);
  const int64_t num_threads = round_up(divide_up(all_threads, parts), 32);
  launch("attention_inputs", context,
         {.grid = dim3(static_cast<unsigned>(inputs.num_tokens), static_cast<unsigned>(parts)),
          .num_threads = static_cast<unsigned>(num_threads)},
         quantized ? attention_inputs_kernel<kLanes, true> : attention_inputs_kernel<kLanes, false>,
         inputs);
  if (!inputs.blocks_apart) return;
  launch("attention_inputs", context,
         {.grid = dim3(static_cast<unsigned>(divide_up(inputs.num_tokens, kBlockTokens)),
                       static_cast<unsigned>(inputs.kv_heads)),
          .num_threads = kBlockThreads},
         value_blocks_kernel<kLanes>, inputs);
}

}  // namespace

bool fused_attention_inputs(Context& context, const ops::AttentionInputsArgs& args) {
  require_cache("attention_inputs", args.cache);
  if (!suits(args)) return false;
  const Shape& cache = args.cache.k.shape;
  AttentionInputs inputs{.qkv = args.qkv.as<Bf16>(),
                         .qkv_stride = args.qkv.row_stride,
                         .q_norm = args.q_norm.as<Bf16>(),
                         .k_norm = args.k_norm.as<Bf16>(),
                         .positions = args.positions.as<int32_t>(),
                         .slots = args.slots.as<int32_t>(),
                         .table = args.rope_table.as<float>(),
                         .table_stride = args.rope_table.row_stride,
                         .num_positions = static_cast<int>(args.rope_table.rows()),
                         .q_out = rows_of(args.q_out),
                         .k_out = args.keep_k ? rows_of(args.k_out) : HeadRows{},
                         .k_pages = pages_of(args.cache.k, args.cache.k_scale),
                         .v_pages = pages_of(args.cache.v, args.cache.v_scale),
                         .num_tokens = static_cast<int>(args.qkv.rows()),
                         .num_slots = static_cast<int>(cache[0] * args.cache.page_size()),
                         .page_size = static_cast<int>(args.cache.page_size()),
                         .blocks_apart = false,
                         .q_heads = static_cast<int>(args.q_out.shape[1]),
                         .kv_heads = static_cast<int>(args.cache.num_heads()),
                         .width = static_cast<int>(cache[3]),
                         .inverse_width = 1.0f / static_cast<float>(cache[3]),
                         .eps = args.eps,
                         .counters = context.counters()};
  const bool quantized = args.cache.k.dtype == DType::kE4M3;
  if (inputs.width <= 64) {
    launch_lanes<8>(context, inputs, quantized);
  } else if (inputs.width <= 128) {
    launch_lanes<16>(context, inputs, quantized);
  } else {
    launch_lanes<32>(context, inputs, quantized);
  }
  return true;
}

}  // namespace octet::cuda
