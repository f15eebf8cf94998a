// Writing keys and values into pages, and copying pages.
#include <algorithm>

#include "backend/cuda/checks.h"
#include "backend/cuda/device/quantizer.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/kv_cache.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"

namespace octet::cuda {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

void require_cache(std::string_view op, const ops::KvCacheView& cache) {
  require_rank(op, "cache.k", cache.k, 4, 4);
  require_dtype(op, "cache.k", cache.k, {DType::kBF16, DType::kE4M3});
  require_like(op, "cache.v", cache.v, cache.k);
  const int64_t width = cache.k.shape[3];
  if (cache.num_heads() < 1 || cache.page_size() < 1 || width < 2 || width > 256 ||
      width % 2 != 0) {
    fail(op, "the cache must have pages, heads and an even head width up to 256, but is {}",
         cache.k.shape.to_string());
  }
  if (cache.k.dtype != DType::kE4M3) return;
  if (cache.page_size() % ops::kValueBlock != 0) {
    fail(op, "pages of E4M3 must have a multiple of {} tokens, but have {}", ops::kValueBlock,
         cache.page_size());
  }
  const Shape shape{cache.k.shape[0], cache.k.shape[1], cache.k.shape[2]};
  for (const TensorView* scales : {&cache.k_scale, &cache.v_scale}) {
    require_shape(op, "the cache's scales", *scales, shape);
    require_dtype(op, "the cache's scales", *scales, {DType::kF32});
  }
}

namespace {

struct Pages {
  void* data;
  int64_t stride;
  float* scales;
  int64_t scale_stride;
};
Pages pages_of(const TensorView& data, const TensorView& scales) {
  return {data.data, data.row_stride, scales.as<float>(), scales.row_stride};
}

// A warp takes one head of one token: blockIdx.y 0 is k, 1 is v.
template <class T, bool kQuantized, int kVector>
__global__ void append_kernel(const T* k, int64_t k_stride, const T* v, int64_t v_stride,
                              const int32_t* slots, int64_t num_slots, int64_t num_heads_all,
                              Pages k_pages, Pages v_pages, int64_t page_size, int64_t heads,
                              int64_t width, DeviceCounters* counters) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  CodeCounts counts;
  if (index < num_heads_all) {
    const int64_t token = index / heads, head = index % heads;
    const int64_t slot = slots[token];
    if (slot >= 0 && slot < num_slots) {
      const bool is_key = blockIdx.y == 0;
      const T* from = (is_key ? k + token * k_stride : v + token * v_stride) + head * width;
      const Pages& pages = is_key ? k_pages : v_pages;
      const int64_t page = slot / page_size, row = head * page_size + slot % page_size;
      const int64_t at = page * pages.stride + row * width;
      const int lane = static_cast<int>(threadIdx.x) * kVector;
      float values[kVector];
      if constexpr (kQuantized) {
        float amax = 0;
        for (int i = lane; i < width; i += 32 * kVector) {
          load_vector(from + i, values);
#pragma unroll
          for (const float value : values) {
            amax = fmaxf(amax, finite_magnitude(round_to_bf16(value)));
          }
        }
        const float scale = scale_of<false>(warp_reduce(amax, Max()), false);
        auto* to = static_cast<uint8_t*>(pages.data);
        auto* value_to = to + page * pages.stride + head * page_size * width;
        bool has_nan = false;
        for (int i = lane; i < width; i += 32 * kVector) {
          load_vector(from + i, values);
          uint32_t word = 0;
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            uint8_t code = counts.encode<false>(round_to_bf16(values[e]), scale);
            if ((code & 0x7Fu) == 0x7Fu) code = 0, has_nan = true;
            word |= uint32_t{code} << 8 * e;
          }
          if (!is_key) {
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              value_to[ops::value_index(slot % page_size, i + e, width)] =
                  static_cast<uint8_t>(word >> 8 * e);
            }
          } else if constexpr (kVector == 4) {
            *reinterpret_cast<uint32_t*>(to + at + i) = word;
          } else {
            to[at + i] = static_cast<uint8_t>(word);
          }
        }
        has_nan = __any_sync(kAllLanes, has_nan);
        if (threadIdx.x == 0) {
          pages.scales[page * pages.scale_stride + row] = has_nan ? kNaN : scale;
        }
      } else {
        auto* to = static_cast<Bf16*>(pages.data) + at;
        for (int i = lane; i < width; i += 32 * kVector) {
          load_vector(from + i, values);
          store_vector(values, to + i);
        }
      }
    }
  }
  if constexpr (kQuantized) counts.add_to(counters);
}

// By value among a kernel's parameters, of which there are 4 KiB.
struct PageCopies {
  static constexpr int kMost = 256;
  ops::KvPageCopy copies[kMost];
};

// A block takes one head of one copy: blockIdx.z 0 is k, 1 is v.
// Of values, whole blocks of `value_block` tokens.
template <class Piece>
__global__ void copy_kernel(const __grid_constant__ PageCopies all, Pages k_pages, Pages v_pages,
                            int64_t element_bytes, int64_t page_size, int64_t token_bytes,
                            int value_block) {
  const ops::KvPageCopy copy = all.copies[blockIdx.x];
  const Pages& pages = blockIdx.z == 0 ? k_pages : v_pages;
  if (copy.source == copy.destination) return;
  const int64_t head = int64_t{blockIdx.y} * page_size;  // in tokens
  const auto at = [&](int32_t page) {
    return reinterpret_cast<Piece*>(static_cast<char*>(pages.data) +
                                    page * pages.stride * element_bytes + head * token_bytes);
  };
  const Piece* from = at(copy.source);
  Piece* to = at(copy.destination);
  const int block = blockIdx.z == 0 ? 1 : value_block;
  const int num_tokens = (copy.num_tokens + block - 1) / block * block;
  const auto count = static_cast<int>(num_tokens * token_bytes / sizeof(Piece));
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    to[i] = from[i];
  }
  if (pages.scales == nullptr) return;
  for (int i = static_cast<int>(threadIdx.x); i < copy.num_tokens;
       i += static_cast<int>(blockDim.x)) {
    pages.scales[copy.destination * pages.scale_stride + head + i] =
        pages.scales[copy.source * pages.scale_stride + head + i];
  }
}

}  // namespace

void kv_append(Context& context, const ops::KvAppendArgs& args) {
  constexpr std::string_view kOp = "kv_append";
  require_cache(kOp, args.cache);
  const Shape& cache = args.cache.k.shape;
  const int64_t num_tokens = args.k.rows(), heads = cache[1], width = cache[3];
  require_shape(kOp, "k", args.k, Shape{num_tokens, heads, width});
  require_float(kOp, "k", args.k);
  require_like(kOp, "v", args.v, args.k);
  require_vector(kOp, "slots", args.slots, DType::kI32, num_tokens);
  if (num_tokens == 0) return;
  const bool quantized = args.cache.k.dtype == DType::kE4M3;
  const dim3 block(32, 8), grid(static_cast<unsigned>(divide_up(num_tokens * heads, 8)), 2);
  const auto launch = [&](auto element) {
    using T = decltype(element);
    const bool vectors = takes_vectors(args.k, width, 4) && takes_vectors(args.v, width, 4) &&
                         takes_vectors(args.cache.k, width, 4) &&
                         takes_vectors(args.cache.v, width, 4);
    const auto kernel = quantized
                            ? (vectors ? append_kernel<T, true, 4> : append_kernel<T, true, 1>)
                            : (vectors ? append_kernel<T, false, 4> : append_kernel<T, false, 1>);
    kernel<<<grid, block, 0, context.stream()>>>(
        args.k.as<T>(), args.k.row_stride, args.v.as<T>(), args.v.row_stride,
        args.slots.as<int32_t>(), cache[0] * cache[2], num_tokens * heads,
        pages_of(args.cache.k, args.cache.k_scale), pages_of(args.cache.v, args.cache.v_scale),
        cache[2], heads, width, context.counters());
  };
  args.k.dtype == DType::kBF16 ? launch(Bf16()) : launch(0.0f);
  check_launch(kOp);
}

void kv_copy(Context& context, const ops::KvCopyArgs& args) {
  constexpr std::string_view kOp = "kv_copy";
  require_cache(kOp, args.cache);
  const int64_t num_pages = args.cache.k.shape[0], page_size = args.cache.page_size();
  for (const ops::KvPageCopy& copy : args.copies) {
    for (const int32_t page : {copy.source, copy.destination}) {
      if (page < 0 || page >= num_pages) fail(kOp, "page {} is not in [0, {})", page, num_pages);
    }
    if (copy.num_tokens < 0 || copy.num_tokens > page_size) {
      fail(kOp, "num_tokens must be in [0, {}], but is {}", page_size, copy.num_tokens);
    }
  }
  const int64_t token_bytes = args.cache.k.shape[3] * tensor::dtype_bytes(args.cache.k.dtype);
  const int value_block = args.cache.v.dtype == DType::kE4M3 ? int{ops::kValueBlock} : 1;
  const auto heads = static_cast<unsigned>(args.cache.num_heads());
  const bool wide = takes_vectors(args.cache.k, args.cache.k.shape[3], 16) &&
                    takes_vectors(args.cache.v, args.cache.v.shape[3], 16);
  const auto kernel = wide ? copy_kernel<uint4> : copy_kernel<uint16_t>;
  for (size_t begin = 0; begin < args.copies.size(); begin += PageCopies::kMost) {
    const size_t count = std::min<size_t>(args.copies.size() - begin, PageCopies::kMost);
    PageCopies copies;
    std::copy_n(args.copies.begin() + static_cast<int64_t>(begin), count, copies.copies);
    kernel<<<dim3(static_cast<unsigned>(count), heads, 2), 128, 0, context.stream()>>>(
        copies, pages_of(args.cache.k, args.cache.k_scale),
        pages_of(args.cache.v, args.cache.v_scale), tensor::dtype_bytes(args.cache.k.dtype),
        page_size, token_bytes, value_block);
    check_launch(kOp);
  }
}

}  // namespace octet::cuda
