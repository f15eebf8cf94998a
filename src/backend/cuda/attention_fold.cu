// From chunks to the rows of single-token sequences: folded in order, divided by the sum, rounded,
// and quantised where the next product wants codes. A block to each row.
#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/quantizer.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

constexpr int kElements = 8;  // of a thread
constexpr int kMaxThreads = 1024;

template <int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    fold_kernel(const __grid_constant__ AttentionProblem p, const QuantizedRows quantized,
                DeviceCounters* counters) {
  const int sequence = blockIdx.x;
  const int token = p.query_offsets[sequence];
  if (p.query_offsets[sequence + 1] - token != 1) return;
  const int width = p.keys.width, columns = p.keys.heads * p.group * width;
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kElements;
  const int head = column / width, element = column - head * width;
  const int limit = p.context_lengths[sequence];
  float result[kElements] = {};
  if (column < columns) {
    const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
    float maximum = -INFINITY, sum = 0;
    const int64_t row = chunk_index(p, sequence, head, 0);
#pragma unroll 4
    for (int chunk = first_key / kChunkKeys; chunk * kChunkKeys < limit; ++chunk) {
      const float2 stats = p.chunk_stats[row + chunk];
      float values[kElements];
      load_vector(p.chunk_values + (row + chunk) * kWidth + element, values);
      const Fold f = fold_of(maximum, stats.x);
      maximum = f.maximum;
      sum = fold(f, sum, stats.y);
#pragma unroll
      for (int i = 0; i < kElements; ++i) result[i] = fold(f, result[i], values[i]);
    }
    if (limit > 0) {
#pragma unroll
      for (float& value : result) value = round_to_bf16(__fdiv_rn(value, sum));
    }
    if (p.out != nullptr) store_vector(result, p.out + token * p.out_stride + column);
    if (element == 0) write_lse(p, token, head, maximum, sum);
  }
  if (quantized.codes == nullptr) return;

  float amax = 0;
#pragma unroll
  for (const float value : result) amax = fmaxf(amax, finite_magnitude(value));
  if (quantized.by_block) {  // 16 threads have 128 columns
#pragma unroll
    for (int offset = 1; offset < 16; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
    }
  } else {
    amax = block_max(amax);
  }
  const float scale = scale_of<false>(amax, quantized.pow2);
  CodeCounts counts;
  if (column < columns) {
    const int block = column / static_cast<int>(tensor::kScaleBlock);
    if (quantized.by_block ? column % tensor::kScaleBlock == 0 : column == 0) {
      const int blocks = quantized.by_block ? (columns + 127) / 128 : 1;
      quantized.scales[int64_t{token} * blocks + (quantized.by_block ? block : 0)] = scale;
    }
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      words[i / 4] |= uint32_t{counts.encode<false>(result[i], scale)} << 8 * (i % 4);
    }
    *reinterpret_cast<uint2*>(quantized.codes + token * quantized.stride + column) =
        make_uint2(words[0], words[1]);
  }
  counts.add_to(counters);
}

}  // namespace

bool attention_fold_quantizes(const AttentionProblem& p, const QuantizedRows& quantized) {
  return p.keys.heads * p.group * p.keys.width <= kMaxThreads * kElements &&
         quantized.stride % kElements == 0 &&
         reinterpret_cast<uintptr_t>(quantized.codes) % kElements == 0;
}

void attention_fold(Context& context, const AttentionProblem& p, const QuantizedRows& quantized) {
  const int64_t threads = divide_up(int64_t{p.keys.heads} * p.group * p.keys.width, kElements);
  const auto block = static_cast<unsigned>(std::min<int64_t>(round_up(threads, 32), kMaxThreads));
  const dim3 grid(static_cast<unsigned>(p.num_sequences),
                  static_cast<unsigned>(divide_up(threads, block)));
  const int width = kernel_width(p.keys.width);
  const auto kernel =
      width == 64 ? fold_kernel<64> : (width == 128 ? fold_kernel<128> : fold_kernel<256>);
  kernel<<<grid, block, 0, context.stream()>>>(p, quantized, context.counters());
  check_launch("attention");
}

}  // namespace octet::cuda
