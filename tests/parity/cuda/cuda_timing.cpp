// Times the small kernels of a step beside what moving their bytes would take. Each case is a graph
// of launches that depend on each other, as in a decoding step; shapes are Qwen3-8B's.
#include <cstdlib>

#include <fmt/format.h>

#include "backend/cuda/context.h"
#include "backend/cuda/fused.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "base/rng.h"
#include "tensor/codec.h"

namespace octet::cuda {
namespace {

using tensor::Buffer;
using tensor::DType;
using tensor::Granularity;
using tensor::Shape;
using tensor::TensorView;

constexpr double kBytesPerSecond = 4.29e12;  // copy bandwidth of one H200

class Timing {
 public:
  TensorView make(DType dtype, const Shape& shape, float scale = 0) {
    TensorView view(nullptr, dtype, shape);
    buffers_.push_back(context_.allocator().allocate(view.num_bytes(), "operand"));
    view.data = buffers_.back().data();
    if (scale != 0) fill(view, scale);
    return view;
  }
  TensorView make_ids(int64_t count, int32_t bound) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      ids[static_cast<size_t>(i)] = static_cast<int32_t>(i % bound);
    }
    const TensorView view = make(DType::kI32, Shape{count});
    context_.upload(ids.data(), view.data, view.num_bytes());
    context_.synchronize();
    return view;
  }

  // Prints the time of one call and the time that `bytes` take.
  template <class Body>
  void time(const std::string& name, int64_t rows, double bytes, const Body& body,
            int num_launches = 50) {
    constexpr int kRepeats = 5;
    const cudaStream_t stream = context_.stream();
    body();
    context_.synchronize();
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < num_launches; ++i) body();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "capture");
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    float best_ms = INFINITY;
    for (int i = 0; i < kRepeats; ++i) {
      check(cudaEventRecord(begin, stream), "event");
      check(cudaGraphLaunch(executable, stream), "graph");
      check(cudaEventRecord(end, stream), "event");
      check(cudaEventSynchronize(end), "event");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      best_ms = std::min(best_ms, ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    const double seconds = 1e-3 * best_ms / num_launches, limit = bytes / kBytesPerSecond;
    fmt::print("{:<34} {:>5} rows {:>9.2f} us   limit {:>8.2f} us   {:>5.1f} %\n", name, rows,
               1e6 * seconds, 1e6 * limit, 100 * limit / seconds);
    std::fflush(stdout);
  }

  void clear() { buffers_.clear(); }
  Context& context() { return context_; }

 private:
  void fill(const TensorView& view, float scale) {
    constexpr size_t kPattern = size_t{1} << 20;
    RandomSequence random({.seed = buffers_.size()}, RngUse::kInit);
    std::vector<float> values(kPattern);
    for (float& value : values) value = scale * static_cast<float>(random.next_normal());
    std::vector<uint16_t> halves(kPattern);
    for (size_t i = 0; i < kPattern; ++i) halves[i] = tensor::encode_bf16(values[i]);
    const bool is_half = view.dtype == DType::kBF16;
    const int64_t pattern_bytes = static_cast<int64_t>(kPattern) * (is_half ? 2 : 4);
    for (int64_t at = 0; at < view.num_bytes(); at += pattern_bytes) {
      context_.upload(is_half ? static_cast<const void*>(halves.data()) : values.data(),
                      view.as<char>() + at, std::min(pattern_bytes, view.num_bytes() - at));
    }
    context_.synchronize();
  }

  Context context_{0, 0};
  std::vector<Buffer> buffers_;
};

ops::QuantizedOutput codes_of(Timing& timing, Granularity granularity, int64_t rows,
                              int64_t columns) {
  return {.out = {timing.make(DType::kE4M3, Shape{rows, columns}),
                  timing.make(DType::kF32, tensor::scale_shape(granularity, rows, columns)),
                  granularity},
          .keep_dense = false};
}

void require_fused(bool fused) {
  if (!fused) fail("timing", "a case was not taken by its fused kernel");
}

void time_rows(Timing& timing, int64_t rows) {
  constexpr int64_t kHidden = 4096, kInner = 12288, kHeads = 32, kKvHeads = 8, kWidth = 128;
  Context& context = timing.context();
  const auto n = static_cast<double>(rows);
  for (const Granularity granularity : {Granularity::kRow, Granularity::kRowBlock}) {
    const std::string suffix(tensor::granularity_name(granularity));
    const TensorView x = timing.make(DType::kBF16, Shape{rows, kHidden}, 1);
    const TensorView branch = timing.make(DType::kBF16, Shape{rows, kHidden}, 0.01f);
    const TensorView y = timing.make(DType::kBF16, Shape{rows, kHidden});
    const TensorView sum = timing.make(DType::kBF16, Shape{rows, kHidden});
    const TensorView weight = timing.make(DType::kBF16, Shape{kHidden}, 1);
    const ops::QuantizedOutput codes = codes_of(timing, granularity, rows, kHidden);
    timing.time("add, norm, quantise " + suffix, rows, n * kHidden * 7, [&] {
      require_fused(fused_rms_norm(
          context,
          {.x = x, .weight = weight, .y = y, .branch = branch, .sum = sum, .quantized = codes}));
    });
    timing.time("quantise " + suffix, rows, n * kHidden * 3,
                [&] { quantize(context, {.x = x, .column_scale = {}, .out = codes.out}); });
    const TensorView gate_up = timing.make(DType::kBF16, Shape{rows, 2 * kInner}, 1);
    const TensorView out = timing.make(DType::kBF16, Shape{rows, kInner});
    const ops::QuantizedOutput inner = codes_of(timing, granularity, rows, kInner);
    timing.time("gated activation, quantise " + suffix, rows, n * kInner * 5, [&] {
      require_fused(
          fused_gated_activation(context, {.gate_up = gate_up, .out = out, .quantized = inner}));
    });
    timing.clear();
  }
  const TensorView x = timing.make(DType::kBF16, Shape{rows, kHidden}, 1);
  const TensorView y = timing.make(DType::kBF16, Shape{rows, kHidden});
  const TensorView weight = timing.make(DType::kBF16, Shape{kHidden}, 1);
  const TensorView embeddings = timing.make(DType::kBF16, Shape{151936, kHidden}, 1);
  const TensorView ids = timing.make_ids(rows, 151936);
  timing.time("embedding", rows, n * kHidden * 4,
              [&] { embedding(context, {.table = embeddings, .ids = ids, .out = y, .scale = 1}); });
  timing.time("norm alone", rows, n * kHidden * 4,
              [&] { require_fused(fused_rms_norm(context, {.x = x, .weight = weight, .y = y})); });
  const int64_t num_pages = (rows + 15) / 16;
  const TensorView qkv =
      timing.make(DType::kBF16, Shape{rows, (kHeads + 2 * kKvHeads) * kWidth}, 1);
  const TensorView norm = timing.make(DType::kBF16, Shape{kWidth}, 1);
  const TensorView table = timing.make(DType::kF32, Shape{4096, kWidth}, 1);
  const TensorView q_out = timing.make(DType::kBF16, Shape{rows, kHeads, kWidth});
  const TensorView k_out = timing.make(DType::kBF16, Shape{rows, kKvHeads, kWidth});
  const TensorView positions = timing.make_ids(rows, 4096), slots = timing.make_ids(rows, 1 << 20);
  for (const DType dtype : {DType::kE4M3, DType::kBF16}) {
    const Shape pages{num_pages, kKvHeads, 16, kWidth}, scales{num_pages, kKvHeads, 16};
    const ops::KvCacheView cache{timing.make(dtype, pages), timing.make(dtype, pages),
                                 timing.make(DType::kF32, scales),
                                 timing.make(DType::kF32, scales)};
    const double bytes =
        n * kWidth * (4 * kHeads + 2 * kKvHeads * (2 + tensor::dtype_bytes(dtype)));
    timing.time("attention inputs, pages " + std::string(tensor::dtype_name(dtype)), rows, bytes,
                [&] {
                  require_fused(fused_attention_inputs(context, {.qkv = qkv,
                                                                 .q_norm = norm,
                                                                 .k_norm = norm,
                                                                 .positions = positions,
                                                                 .rope_table = table,
                                                                 .slots = slots,
                                                                 .q_out = q_out,
                                                                 .k_out = k_out,
                                                                 .cache = cache,
                                                                 .keep_k = false}));
                });
  }
  timing.clear();
}

// Both products of the adapters of a group.
void time_adapters(Timing& timing, int64_t rows, int64_t inputs,
                   const std::vector<int64_t>& outputs) {
  constexpr int64_t kRank = 32;
  Context& context = timing.context();
  const auto n = static_cast<double>(rows);
  int64_t all = 0;
  for (const int64_t part : outputs) all += part;
  const auto parts = static_cast<int64_t>(outputs.size());
  const TensorView x = timing.make(DType::kBF16, Shape{rows, inputs}, 1);
  const TensorView t = timing.make(DType::kBF16, Shape{rows, parts * kRank}, 1);
  const TensorView y = timing.make(DType::kBF16, Shape{rows, all}, 1);
  std::vector<ops::Weight> a, b;
  for (const int64_t part : outputs) {
    a.push_back({timing.make(DType::kBF16, Shape{kRank, inputs}, 0.1f), {}});
    b.push_back({timing.make(DType::kBF16, Shape{part, kRank}, 0.1f), {}});
  }
  const auto shape = fmt::format("{} -> {} x {} -> {}", inputs, parts, kRank, all);
  timing.time("adapters A " + shape, rows,
              2 * (n * static_cast<double>(inputs + parts * kRank) +
                   static_cast<double>(parts * kRank * inputs)),
              [&] { linear(context, {.x = x, .xq = {}, .weights = a, .bias = {}, .y = t}); });
  timing.time(
      "adapters B " + shape, rows,
      2 * (n * static_cast<double>(2 * all + parts * kRank) + static_cast<double>(all * kRank)),
      [&] {
        linear(context, {.x = t,
                         .xq = {},
                         .weights = b,
                         .bias = {},
                         .y = y,
                         .alpha = 0.01f,
                         .accumulate = true,
                         .x_per_weight = true});
      });
  timing.clear();
}

void time_logits(Timing& timing, int64_t rows) {
  constexpr int64_t kColumns = 151936;
  Context& context = timing.context();
  const double bytes = 4.0 * static_cast<double>(rows * kColumns);
  const TensorView logits = timing.make(DType::kF32, Shape{rows, kColumns}, 3);
  const TensorView ids = timing.make_ids(rows, 1000);
  const TensorView log_probs = timing.make(DType::kF32, Shape{rows});
  const TensorView entropy = timing.make(DType::kF32, Shape{rows});
  std::vector<ops::SampleParams> params(static_cast<size_t>(rows));
  const auto time_sampling = [&](const std::string& name, const ops::SampleParams& rule,
                                 int num_launches = 50) {
    for (size_t i = 0; i < params.size(); ++i) {
      params[i] = rule;
      params[i].random = static_cast<uint32_t>(i) * 0x9E3779B9u;
    }
    timing.time(
        name, rows, bytes,
        [&] {
          sample(context, {.logits = logits,
                           .params = params,
                           .ids = ids,
                           .log_probs = log_probs,
                           .kept_log_probs = {},
                           .num_known = kColumns});
        },
        num_launches);
  };
  time_sampling("sample", {});
  time_sampling("sample at 0.7", {.temperature = 0.7f});
  time_sampling("sample greedily", {.temperature = 0});
  time_sampling("sample with top_p", {.top_p = 0.95f}, 10);
  time_sampling("sample with top_k", {.top_k = 50}, 10);
  time_sampling("sample with top_k and top_p", {.top_p = 0.95f, .top_k = 50}, 10);
  time_sampling("sample with min_p", {.min_p = 0.05f}, 10);
  timing.time("log-probabilities", rows, bytes, [&] {
    cuda::log_probs(context, {logits, ids, log_probs, {}, 1.0f, kColumns});
  });
  timing.time("log-probabilities and entropy", rows, bytes, [&] {
    cuda::log_probs(context, {logits, ids, log_probs, entropy, 1.0f, kColumns});
  });
  const TensorView gradient = timing.make(DType::kBF16, Shape{rows, kColumns});
  timing.time("gradient of log-probabilities", rows, 2.5 * bytes, [&] {
    log_probs_backward(context, {logits, ids, log_probs, {}, gradient, 1.0f, kColumns});
  });
  timing.clear();
}

int run() {
  Timing timing;
  for (const int64_t rows : {1, 16, 64, 256, 8192}) time_rows(timing, rows);
  for (const int64_t rows : {1, 16, 64, 256, 8192}) {
    time_adapters(timing, rows, 4096, {4096, 1024, 1024});
    time_adapters(timing, rows, 4096, {4096});
    time_adapters(timing, rows, 4096, {12288, 12288});
    time_adapters(timing, rows, 12288, {4096});
  }
  for (const int64_t rows : {1, 16, 64, 256, 512}) time_logits(timing, rows);
  return 0;
}

}  // namespace
}  // namespace octet::cuda

int main() {
  try {
    return octet::cuda::run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
