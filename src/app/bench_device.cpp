#include "app/bench_device.h"

#include <optional>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/output.h"
#include "app/shapes.h"
#include "bench/attention.h"
#include "bench/device_limits.h"
#include "model/kv_store.h"

namespace octet::app {
namespace {

using bench::AttentionRow;
using bench::DeviceLimits;

std::string describe(const AttentionRow& row) {
  const bench::AttentionCase& shape = row.shape;
  if (shape.new_tokens > 1) {
    return fmt::format("prefill {} x {}", shape.sequences, shape.new_tokens);
  }
  if (shape.shared == 0) return fmt::format("decode {} at {}", shape.sequences, shape.context);
  return fmt::format("decode {} at {}, {} of {}", shape.sequences, shape.context, shape.shared,
                     shape.group);
}

std::string json(const AttentionRow& row, const DeviceLimits& limits) {
  const bench::AttentionCase& shape = row.shape;
  return fmt::format(
      "{{\"sequences\":{},\"new_tokens\":{},\"context\":{},\"group\":{},\"shared_tokens\":{},"
      "\"kv\":\"{}\",\"seconds\":{},\"bytes_per_second\":{},\"share_of_bandwidth\":{},"
      "\"flops\":{},\"share_of_bf16_peak\":{}}}",
      shape.sequences, shape.new_tokens, shape.context, shape.group, shape.shared,
      row.fp8 ? "fp8" : "bf16", row.seconds, row.bytes / row.seconds,
      row.bytes / row.seconds / limits.copy_bandwidth, row.flops / row.seconds,
      row.flops / row.seconds / limits.bf16_flops);
}

std::string json(const DeviceLimits& limits) {
  return fmt::format("\"copy_bandwidth\":{},\"bf16_flops\":{},\"fp8_flops\":{}",
                     limits.copy_bandwidth, limits.bf16_flops, limits.fp8_flops);
}

std::string describe(const ops::Backend& backend, const DeviceLimits& limits) {
  return fmt::format("{}: copy {:.0f} GB/s; products {:.4g} TFLOP/s in BF16, {:.4g} in FP8",
                     backend.name(), 1e-9 * limits.copy_bandwidth, 1e-12 * limits.bf16_flops,
                     1e-12 * limits.fp8_flops);
}

}  // namespace

int run_bench_limits(const BenchArguments& arguments) {
  const std::unique_ptr<ops::Backend> backend = make_backend(arguments.device);
  const DeviceLimits limits = bench::measure_device_limits(*backend);
  if (arguments.json) {
    print_line(fmt::format("{{\"bench\":\"limits\",\"backend\":{},{}}}",
                           json_string(backend->name()), json(limits)));
  } else {
    print_line(describe(*backend, limits));
  }
  return 0;
}

int run_bench_attention(const BenchArguments& arguments) {
  const std::unique_ptr<ops::Backend> backend = make_backend(arguments.device);
  const io::ModelConfig config = shape_named(arguments.shape, 1);
  const bench::AttentionHeads heads{config.num_attention_heads, config.num_key_value_heads,
                                    config.head_dim};
  const DeviceLimits limits = bench::measure_device_limits(*backend);
  const std::vector<bench::AttentionCase> cases = bench::attention_cases(limits);
  if (!arguments.json) {
    print_line(describe(*backend, limits));
    if (limits.slow()) print_line("smaller cases than on a GPU, which take this device seconds");
    print_line(fmt::format("{} query heads, {} of keys and values, width {}", heads.query,
                           heads.key_value, heads.width));
    print_line(fmt::format("{:<32} {:<4} {:>10} {:>8} {:>9} {:>9} {:>9}", "attention", "KV", "us",
                           "GB/s", "of copy", "TFLOP/s", "of BF16"));
  }
  std::vector<std::string> rows;
  observe::Progress progress =
      progress_bar("bench", 2 * static_cast<int64_t>(cases.size()), "cases");
  for (const bench::AttentionCase& shape : cases) {
    for (const bool fp8 : {true, false}) {
      std::optional<model::KvStore> store;
      const bench::AttentionPages pages{
          .page_size = model::KvStore::kPageSize, .fp8 = fp8, .make = [&](int64_t num_pages) {
            return store
                .emplace(backend->allocator(), config,
                         fp8 ? tensor::DType::kE4M3 : tensor::DType::kBF16, num_pages)
                .layer(0);
          }};
      const AttentionRow row = bench::measure_attention(*backend, heads, shape, pages, limits);
      rows.push_back(json(row, limits));
      progress.update(static_cast<int64_t>(rows.size()), describe(row));
      if (arguments.json) continue;
      const double bandwidth = row.bytes / row.seconds, flops = row.flops / row.seconds;
      print_line(fmt::format("{:<32} {:<4} {:>10.1f} {:>8.0f} {:>8.1f}% {:>9.1f} {:>8.1f}%",
                             describe(row), fp8 ? "fp8" : "bf16", 1e6 * row.seconds,
                             1e-9 * bandwidth, 100 * bandwidth / limits.copy_bandwidth,
                             1e-12 * flops, 100 * flops / limits.bf16_flops));
    }
  }
  if (arguments.json) {
    print_line(fmt::format("{{\"bench\":\"attention\",\"backend\":{},{},\"rows\":[{}]}}",
                           json_string(backend->name()), json(limits), fmt::join(rows, ",")));
  }
  return 0;
}

}  // namespace octet::app
