// From chunks to the rows of single-token sequences: folded in order, by their sum (share_of),
// rounded, and quantised where the next product wants codes. A block to each row.
#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/row_vectors.cuh"
#include "backend/cuda/device/vectors.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/quantized_rows.h"

namespace octet::cuda {
namespace {

constexpr int kElements = 8;  // of a thread
constexpr int kMaxThreads = 1024;
constexpr int kAhead = 4;  // chunks that are loaded together

// A chunk's part of a thread: what it saw, and its values.
struct ChunkPart {
  float2 stats;
  float values[kElements];
};

template <int kWidth, RowScales kScales>
__global__ void __launch_bounds__(kMaxThreads)
    fold_kernel(const __grid_constant__ AttentionProblem p, const QuantizedRows quantized) {
  invite_successor();
  const int sequence = blockIdx.x;
  const int token = p.query_offsets[sequence];
  const int limit = p.context_lengths[sequence];
  const bool serves = p.query_offsets[sequence + 1] - token == 1;
  await_predecessor();
  if (!serves) return;
  const int width = p.keys.width, columns = p.keys.heads * p.group * width;
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kElements;
  uint4 pairs[1] = {make_uint4(0, 0, 0, 0)};
  if (column < columns) {
    const int head = column / width, element = column - head * width;
    const int first_key = p.window > 0 ? max(0, limit - p.window) : 0;
    const int end = (limit + kChunkKeys - 1) / kChunkKeys;
    const int64_t row = chunk_index(p, sequence, head, 0);
    const float2* stats = p.chunk_stats + row;
    const float* values = p.chunk_values + row * kWidth + element;
    float maximum = -INFINITY, sum = 0, result[kElements] = {};
    for (int begin = first_key / kChunkKeys; begin < end; begin += kAhead) {
      ChunkPart parts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i >= end) continue;
        parts[i].stats = stats[begin + i];
        load_vector(values + int64_t{begin + i} * kWidth, parts[i].values);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i >= end) continue;
        const Fold f = fold_of(maximum, parts[i].stats.x);
        maximum = f.maximum;
        sum = fold(f, sum, parts[i].stats.y);
#pragma unroll
        for (int e = 0; e < kElements; ++e) result[e] = fold(f, result[e], parts[i].values[e]);
      }
    }
    const float share = share_of(sum);
#pragma unroll
    for (float& value : result) value *= share;
    pairs[0] = pack8(result);
    if (p.out != nullptr) store8(pairs[0], p.out + token * p.out_stride + column);
    if (element == 0) write_lse(p, token, head, maximum, sum);
  }
  if constexpr (kScales != RowScales::kNone) {
    quantize_row<false, kScales, false>(pairs, token, column, columns, quantized);
  }
}

template <RowScales kScales>
auto kernel_of(int width) {
  return width == 64    ? fold_kernel<64, kScales>
         : width == 128 ? fold_kernel<128, kScales>
                        : fold_kernel<256, kScales>;
}

}  // namespace

bool attention_fold_quantizes(const AttentionProblem& p, const ops::QuantizedOutput& output) {
  const int64_t columns = int64_t{p.keys.heads} * p.group * p.keys.width;
  return !output.empty() && columns <= kMaxThreads * kElements &&
         takes_quantized(output, p.num_tokens, columns);
}

void attention_fold(Context& context, const AttentionProblem& p, const QuantizedRows& quantized) {
  const int64_t threads = divide_up(int64_t{p.keys.heads} * p.group * p.keys.width, kElements);
  const auto block = static_cast<unsigned>(std::min<int64_t>(round_up(threads, 32), kMaxThreads));
  const dim3 grid(static_cast<unsigned>(p.num_sequences),
                  static_cast<unsigned>(divide_up(threads, block)));
  const int width = kernel_width(p.keys.width);
  const auto kernel = quantized.kind == RowScales::kNone ? kernel_of<RowScales::kNone>(width)
                      : quantized.kind == RowScales::kPerRow
                          ? kernel_of<RowScales::kPerRow>(width)
                          : kernel_of<RowScales::kPerBlock>(width);
  launch("attention", context, {.grid = grid, .num_threads = block}, kernel, p, quantized);
}

}  // namespace octet::cuda
