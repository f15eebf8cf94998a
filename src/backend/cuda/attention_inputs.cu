// From the projections to attention's operands in one kernel: the norm of each head of q and k, the
// rotation, and keys and values into their pages.
#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_quantizer.cuh"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/fused.h"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/launch.cuh"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int kThreads = 256;

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
  int num_slots, page_size;
  int num_tokens, q_heads, kv_heads, width;
  float eps;
  DeviceCounters* counters;
};

// Both sides of the rotation for these eight of a head, whose partners lie `half` away in the lane
// `partner`; each side's own value stands first in its products, as in ops/rope.h.
__device__ uint4 rotated8(const uint4& pairs, const uint4& partner, const float* row, int column,
                          int half) {
  const bool is_high = column >= half;
  const float* cosines = row + (is_high ? column - half : column);
  float own[8], other[8], c[8], s[8];
  unpack8(pairs, own);
  unpack8(partner, other);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 cosine = reinterpret_cast<const float4*>(cosines)[i];
    const float4 sine = reinterpret_cast<const float4*>(cosines + half)[i];
    c[4 * i] = cosine.x, c[4 * i + 1] = cosine.y, c[4 * i + 2] = cosine.z, c[4 * i + 3] = cosine.w;
    s[4 * i] = sine.x, s[4 * i + 1] = sine.y, s[4 * i + 2] = sine.z, s[4 * i + 3] = sine.w;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float turned = other[i] * s[i];
    own[i] = is_high ? own[i] * c[i] + turned : own[i] * c[i] - turned;
  }
  return pack8(own);
}

// kLanes neighbouring lanes take one head of one token, eight elements each. All lanes of a warp
// stay together; those without a head work on zeros.
template <int kLanes, bool kQuantized>
__global__ void __launch_bounds__(kThreads) attention_inputs_kernel(const AttentionInputs args) {
  const int heads = args.q_heads + 2 * args.kv_heads;
  const int index =
      (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = 8 * lane;
  const int token = index / heads, head = index % heads;
  const bool is_inside = token < args.num_tokens && column < args.width;
  const bool is_query = head < args.q_heads, is_value = head >= args.q_heads + args.kv_heads;
  const bool turns = is_inside && !is_value;
  // What is read of memory, all of it before the first use.
  uint4 pairs = make_uint4(0, 0, 0, 0), weights = pairs;
  int position = -1, slot = -1;
  if (is_inside) {
    pairs = load8(args.qkv + token * args.qkv_stride + head * args.width + column);
    if (!is_value) position = args.positions[token];
    if (!is_query) slot = args.slots[token];
    const Bf16* norm = is_query ? args.q_norm : args.k_norm;
    if (norm != nullptr && !is_value) weights = load8(norm + column);
  }
  if (args.q_norm != nullptr) {
    const float squares = lanes_sum<kLanes>(add_squares(pairs, 0));
    if (turns) pairs = normed8(pairs, weights, inverse_rms(squares, args.width, args.eps), 0.0f);
  }
  const int half = args.width / 2, step = half / 8;
  const int partner = lane < step ? lane + step : lane - step;
  const uint4 other = make_uint4(__shfl_sync(kAllLanes, pairs.x, partner, kLanes),
                                 __shfl_sync(kAllLanes, pairs.y, partner, kLanes),
                                 __shfl_sync(kAllLanes, pairs.z, partner, kLanes),
                                 __shfl_sync(kAllLanes, pairs.w, partner, kLanes));
  if (turns && position >= 0 && position < args.num_positions) {
    pairs = rotated8(pairs, other, args.table + position * args.table_stride, column, half);
  }
  if (is_inside && is_query) {
    store8(pairs, args.q_out.data + token * args.q_out.stride + head * args.width + column);
  }
  const int kv_head = head - args.q_heads - (is_value ? args.kv_heads : 0);
  if (turns && !is_query && args.k_out.data != nullptr) {
    store8(pairs, args.k_out.data + token * args.k_out.stride + kv_head * args.width + column);
  }
  const bool appends = slot >= 0 && slot < args.num_slots;
  const Pages& pages = is_value ? args.v_pages : args.k_pages;
  const int page = slot / args.page_size;
  const int row = kv_head * args.page_size + slot % args.page_size;
  const int64_t at = page * pages.stride + int64_t{row} * args.width + column;
  if constexpr (kQuantized) {
    RowEncoder<false> encoder;
    uint32_t bits = join_halves(largest_of(pairs));
    if (__any_sync(kAllLanes, bits >= kBf16Infinity)) bits = largest_finite_of(pairs);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
    }
    if (appends) {
      const float scale = scale_of<false>(__uint_as_float(bits << 16), false);
      if (lane == 0) pages.scales[page * pages.scale_stride + row] = scale;
      encoder.set_scale(scale);
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(pages.data) + at) = encoder.encode(pairs);
    }
    const int appended = __syncthreads_count(appends);
    if (appended == 0) return;
    add_counts(encoder, args.counters);
    if (threadIdx.x == 0) {
      atomicAdd(&args.counters->elements, static_cast<unsigned long long>(8 * appended));
    }
  } else if (appends) {
    store8(pairs, static_cast<Bf16*>(pages.data) + at);
  }
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

template <int kLanes>
void launch_lanes(Context& context, const AttentionInputs& inputs, bool quantized) {
  const int64_t heads = inputs.q_heads + 2 * inputs.kv_heads;
  launch("attention_inputs", context.stream(),
         {static_cast<unsigned>(divide_up(inputs.num_tokens * heads * kLanes, kThreads)),
          dim3(kThreads)},
         quantized ? attention_inputs_kernel<kLanes, true> : attention_inputs_kernel<kLanes, false>,
         inputs);
}

}  // namespace

bool fused_attention_inputs(Context& context, const ops::AttentionInputsArgs& args) {
  require_cache("attention_inputs", args.cache);
  if (!suits(args)) return false;
  const Shape& cache = args.cache.k.shape;
  const AttentionInputs inputs{.qkv = args.qkv.as<Bf16>(),
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
                               .num_slots = static_cast<int>(cache[0] * args.cache.page_size()),
                               .page_size = static_cast<int>(args.cache.page_size()),
                               .num_tokens = static_cast<int>(args.qkv.rows()),
                               .q_heads = static_cast<int>(args.q_out.shape[1]),
                               .kv_heads = static_cast<int>(args.cache.num_heads()),
                               .width = static_cast<int>(cache[3]),
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
