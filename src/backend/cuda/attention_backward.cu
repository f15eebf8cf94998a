// The attention gradient, a block to each query row and to each key row; sums in one fixed order.
// With p = exp(scale q·k − lse), dp = dout·v and δ = dout·out:
//   ds = p (dp − δ) scale;  dq += ds k;  dk += ds q;  dv += p dout   (Dao, arXiv 2307.08691)
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/reduce.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

constexpr int kThreads = 128;
constexpr int kMaxWidth = 256;

struct HeadRows {  // [T, heads, width]
  Bf16* data;
  int64_t stride;
  __device__ Bf16* at(int64_t token, int64_t head, int64_t width) const {
    return data + token * stride + head * width;
  }
};
HeadRows heads_of(const TensorView& view) { return {view.as<Bf16>(), view.row_stride}; }

struct Problem {
  HeadRows q, out, dout, dq, dk, dv;
  const float* lse;
  int64_t lse_stride;
  const int32_t* query_offsets;
  const int32_t* page_table;
  int64_t table_stride;
  int num_sequences, num_heads, kv_heads, width, window;
  float scale;
  float* k;  // decoded, [T, kv_heads, width]
  float* v;
  float* delta;  // [T, num_heads]
};

__device__ int sequence_of(const Problem& p, int token) {
  int low = 0;
  for (int high = p.num_sequences; high - low > 1;) {
    const int middle = (low + high) / 2;
    (p.query_offsets[middle] <= token ? low : high) = middle;
  }
  return low;
}

struct Cache {
  const void* data;
  const float* scales;
  int64_t stride, scale_stride;
  int page_size, num_pages, max_pages;
  bool fp8, in_blocks;  // as E4M3 values lie
};

// Keys or values of the batch's tokens out of their pages.
__global__ void gather_kernel(const __grid_constant__ Problem p,
                              const __grid_constant__ Cache cache, float* to) {
  const int token = blockIdx.x;
  const int sequence = sequence_of(p, token);
  if (token >= p.query_offsets[p.num_sequences]) return;
  const int position = token - p.query_offsets[sequence];
  const int table = position / cache.page_size, slot = position % cache.page_size;
  const int page = table < cache.max_pages ? p.page_table[sequence * p.table_stride + table] : -1;
  if (page < 0 || page >= cache.num_pages) return;
  const int row = p.kv_heads * p.width;
  for (int i = threadIdx.x; i < row; i += kThreads) {
    const int64_t head = i / p.width * cache.page_size, at_row = head + slot;
    const int64_t at = page * cache.stride + head * p.width +
                       (cache.in_blocks ? ops::value_index(slot, i % p.width, p.width)
                                        : int64_t{slot} * p.width + i % p.width);
    float value = 0;
    if (cache.fp8) {
      value = decode_fp8<false>(static_cast<const uint8_t*>(cache.data)[at]) *
              cache.scales[page * cache.scale_stride + at_row];
    } else {
      value = load(static_cast<const Bf16*>(cache.data) + at);
    }
    to[int64_t{token} * row + i] = value;
  }
}

// A warp to each (token, head).
__global__ void delta_kernel(const __grid_constant__ Problem p, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (index >= count) return;
  const int64_t token = index / p.num_heads, head = index % p.num_heads;
  float sum = 0;
  for (int i = threadIdx.x % 32; i < p.width; i += 32) {
    sum = fmaf(load(p.dout.at(token, head, p.width) + i), load(p.out.at(token, head, p.width) + i),
               sum);
  }
  sum = warp_reduce(sum, Sum());
  if (threadIdx.x % 32 == 0) p.delta[index] = sum;
}

template <class Row>
__device__ float dot(const float* a, const Row* b, int width) {
  float sum = 0;
  for (int i = 0; i < width; ++i) sum = fmaf(a[i], load(b + i), sum);
  return sum;
}

struct Pair {
  float p, ds;
};
__device__ Pair weigh(const Problem& p, float score, float dp, int64_t token, int64_t head) {
  const float weight = expf(score * p.scale - p.lse[token * p.lse_stride + head]);
  return {weight, weight * ((dp - p.delta[token * p.num_heads + head]) * p.scale)};
}

__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ Problem p) {
  __shared__ float q[kMaxWidth], dout[kMaxWidth], ds[kThreads];
  const int token = blockIdx.x, head = blockIdx.y, kv_head = head / (p.num_heads / p.kv_heads);
  if (token >= p.query_offsets[p.num_sequences]) return;
  const int begin = p.query_offsets[sequence_of(p, token)];
  for (int i = threadIdx.x; i < p.width; i += kThreads) {
    q[i] = load(p.q.at(token, head, p.width) + i);
    dout[i] = load(p.dout.at(token, head, p.width) + i);
  }
  __syncthreads();
  const int64_t row = int64_t{p.kv_heads} * p.width;
  const float* k = p.k + kv_head * p.width;
  const float* v = p.v + kv_head * p.width;
  float sums[kMaxWidth / kThreads] = {};
  const int first = p.window > 0 ? max(begin, token + 1 - p.window) : begin;
  for (int tile = first; tile <= token; tile += kThreads) {
    const int key = tile + static_cast<int>(threadIdx.x);
    ds[threadIdx.x] = key <= token ? weigh(p, dot(q, k + key * row, p.width),
                                           dot(dout, v + key * row, p.width), token, head)
                                         .ds
                                   : 0.0f;
    __syncthreads();
    for (int j = 0; j < min(kThreads, token + 1 - tile); ++j) {
#pragma unroll
      for (int part = 0; part < kMaxWidth / kThreads; ++part) {
        const int i = part * kThreads + static_cast<int>(threadIdx.x);
        if (i < p.width) sums[part] = fmaf(ds[j], k[(tile + j) * row + i], sums[part]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int part = 0; part < kMaxWidth / kThreads; ++part) {
    const int i = part * kThreads + static_cast<int>(threadIdx.x);
    if (i < p.width) store(sums[part], p.dq.at(token, head, p.width) + i);
  }
}

__global__ void __launch_bounds__(kThreads) key_kernel(const __grid_constant__ Problem p) {
  __shared__ float k[kMaxWidth], v[kMaxWidth], weights[kThreads], ds[kThreads];
  const int key = blockIdx.x, kv_head = blockIdx.y, group = p.num_heads / p.kv_heads;
  if (key >= p.query_offsets[p.num_sequences]) return;
  int end = p.query_offsets[sequence_of(p, key) + 1];
  if (p.window > 0) end = min(end, key + p.window);
  const int64_t at = (int64_t{key} * p.kv_heads + kv_head) * p.width;
  for (int i = threadIdx.x; i < p.width; i += kThreads) {
    k[i] = p.k[at + i];
    v[i] = p.v[at + i];
  }
  __syncthreads();
  float dk[kMaxWidth / kThreads] = {}, dv[kMaxWidth / kThreads] = {};
  const int count = (end - key) * group;  // rows: query tokens × heads of the group
  for (int tile = 0; tile < count; tile += kThreads) {
    const int row = tile + static_cast<int>(threadIdx.x);
    Pair pair{0, 0};
    if (row < count) {
      const int token = key + row / group, head = kv_head * group + row % group;
      pair = weigh(p, dot(k, p.q.at(token, head, p.width), p.width),
                   dot(v, p.dout.at(token, head, p.width), p.width), token, head);
    }
    weights[threadIdx.x] = pair.p;
    ds[threadIdx.x] = pair.ds;
    __syncthreads();
    for (int j = 0; j < min(kThreads, count - tile); ++j) {
      const int token = key + (tile + j) / group, head = kv_head * group + (tile + j) % group;
#pragma unroll
      for (int part = 0; part < kMaxWidth / kThreads; ++part) {
        const int i = part * kThreads + static_cast<int>(threadIdx.x);
        if (i >= p.width) continue;
        dk[part] = fmaf(ds[j], load(p.q.at(token, head, p.width) + i), dk[part]);
        dv[part] = fmaf(weights[j], load(p.dout.at(token, head, p.width) + i), dv[part]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int part = 0; part < kMaxWidth / kThreads; ++part) {
    const int i = part * kThreads + static_cast<int>(threadIdx.x);
    if (i >= p.width) continue;
    store(dk[part], p.dk.at(key, kv_head, p.width) + i);
    store(dv[part], p.dv.at(key, kv_head, p.width) + i);
  }
}

Cache cache_of(const TensorView& data, const TensorView& scales, const TensorView& page_table,
               bool is_value) {
  return {data.data,
          scales.as<float>(),
          data.row_stride,
          scales.row_stride,
          static_cast<int>(data.shape[2]),
          static_cast<int>(data.shape[0]),
          static_cast<int>(page_table.shape[1]),
          data.dtype == DType::kE4M3,
          is_value && data.dtype == DType::kE4M3};
}

}  // namespace

void attention_backward(Context& context, const ops::AttentionBackwardArgs& args) {
  constexpr std::string_view kOp = "attention_backward";
  require_cache(kOp, args.cache);
  require_rank(kOp, "q", args.q, 3, 3);
  require_dtype(kOp, "q", args.q, {DType::kBF16});
  const int64_t num_tokens = args.q.shape[0], num_heads = args.q.shape[1], width = args.q.shape[2];
  const int64_t kv_heads = args.cache.num_heads();
  if (num_heads < 1 || num_heads % kv_heads != 0 || width != args.cache.k.shape[3]) {
    fail(kOp, "q {} does not fit {} key/value heads of width {}", args.q.shape.to_string(),
         kv_heads, args.cache.k.shape[3]);
  }
  for (const auto& [name, view] : {std::pair<const char*, const TensorView*>{"out", &args.out},
                                   {"dout", &args.dout},
                                   {"dq", &args.dq}}) {
    require_like(kOp, name, *view, args.q);
  }
  for (const auto& [name, view] :
       {std::pair<const char*, const TensorView*>{"dk", &args.dk}, {"dv", &args.dv}}) {
    require_shape(kOp, name, *view, Shape{num_tokens, kv_heads, width});
    require_dtype(kOp, name, *view, {DType::kBF16});
  }
  require_dtype(kOp, "lse", args.lse, {DType::kF32});
  require_shape(kOp, "lse", args.lse, Shape{num_tokens, num_heads});
  require_rank(kOp, "page_table", args.batch.page_table, 2, 2);
  const int64_t num_sequences = args.batch.page_table.shape[0];
  require_vector(kOp, "query_offsets", args.batch.query_offsets, DType::kI32, num_sequences + 1);
  if (num_tokens == 0 || num_sequences == 0) return;

  const int64_t kv_elements = num_tokens * kv_heads * width;
  auto* scratch =
      context.scratch<float>(kScratchAttention, 2 * kv_elements + num_tokens * num_heads);
  const Problem p{.q = heads_of(args.q),
                  .out = heads_of(args.out),
                  .dout = heads_of(args.dout),
                  .dq = heads_of(args.dq),
                  .dk = heads_of(args.dk),
                  .dv = heads_of(args.dv),
                  .lse = args.lse.as<float>(),
                  .lse_stride = args.lse.row_stride,
                  .query_offsets = args.batch.query_offsets.as<int32_t>(),
                  .page_table = args.batch.page_table.as<int32_t>(),
                  .table_stride = args.batch.page_table.row_stride,
                  .num_sequences = static_cast<int>(num_sequences),
                  .num_heads = static_cast<int>(num_heads),
                  .kv_heads = static_cast<int>(kv_heads),
                  .width = static_cast<int>(width),
                  .window = static_cast<int>(std::min<int64_t>(args.window, 1 << 30)),
                  .scale = args.scale,
                  .k = scratch,
                  .v = scratch + kv_elements,
                  .delta = scratch + 2 * kv_elements};
  const auto tokens = static_cast<unsigned>(num_tokens);
  const cudaStream_t stream = context.stream();
  const TensorView& table = args.batch.page_table;
  gather_kernel<<<tokens, kThreads, 0, stream>>>(
      p, cache_of(args.cache.k, args.cache.k_scale, table, false), p.k);
  gather_kernel<<<tokens, kThreads, 0, stream>>>(
      p, cache_of(args.cache.v, args.cache.v_scale, table, true), p.v);
  const int64_t rows = num_tokens * num_heads;
  delta_kernel<<<static_cast<unsigned>(divide_up(rows, kThreads / 32)), kThreads, 0, stream>>>(
      p, rows);
  query_kernel<<<dim3(tokens, static_cast<unsigned>(num_heads)), kThreads, 0, stream>>>(p);
  key_kernel<<<dim3(tokens, static_cast<unsigned>(kv_heads)), kThreads, 0, stream>>>(p);
  check_launch(kOp);
}

}  // namespace octet::cuda
