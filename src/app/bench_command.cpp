#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/bench_device.h"
#include "app/bench_rollout.h"
#include "app/commands.h"
#include "app/output.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "bench/gemm.h"

namespace octet::app {
namespace {

const char* limit_name(const bench::GemmRow& row) {
  return row.limited_by_memory ? "memory" : "fma";
}

std::string table(const bench::GemmReport& report, int num_threads) {
  std::string text = fmt::format("{}, {} thread(s); FMA peak of one thread {:.1f} GFLOP/s\n",
                                 report.backend, num_threads, report.peak_gflops);
  text += fmt::format("{:<12} {:<8} {:>7} {:>7} {:>7} {:>11} {:>10} {:>8} {:>17} {:>9}\n",
                      "product", "format", "tokens", "outputs", "inputs", "seconds", "GFLOP/s",
                      "of peak", "limit, GFLOP/s", "of limit");
  for (const bench::GemmRow& row : report.rows) {
    text += fmt::format(
        "{:<12} {:<8} {:>7} {:>7} {:>7} {:>11.3g} {:>10.1f} {:>7.1f}% {:>10.1f} {:<6} "
        "{:>8.1f}%\n",
        row.product, row.format, row.shape.tokens, row.shape.outputs, row.shape.inputs, row.seconds,
        row.gflops, 100 * row.share_of_peak, row.limit_gflops, limit_name(row),
        100 * row.share_of_limit);
  }
  return text;
}

std::string json(const bench::GemmReport& report, int num_threads) {
  std::vector<std::string> rows;
  for (const bench::GemmRow& row : report.rows) {
    rows.push_back(fmt::format(
        "{{\"product\":\"{}\",\"format\":\"{}\",\"tokens\":{},\"outputs\":{},"
        "\"inputs\":{},\"seconds\":{},\"gflops\":{},\"share_of_peak\":{},"
        "\"limit\":\"{}\",\"limit_gflops\":{},\"share_of_limit\":{}}}",
        row.product, row.format, row.shape.tokens, row.shape.outputs, row.shape.inputs, row.seconds,
        row.gflops, row.share_of_peak, limit_name(row), row.limit_gflops, row.share_of_limit));
  }
  return fmt::format(
      "{{\"bench\":\"gemm\",\"backend\":{},\"threads\":{},\"peak_gflops\":{},\"rows\":[{}]}}\n",
      json_string(report.backend), num_threads, report.peak_gflops, fmt::join(rows, ","));
}

}  // namespace

int run_bench(const BenchArguments& arguments) {
  if (arguments.what == "rollout" || arguments.what == "exactness") {
    return run_bench_rollout(arguments);
  }
  if (arguments.what == "limits") return run_bench_limits(arguments);
  if (arguments.what == "attention") return run_bench_attention(arguments);
  if (arguments.what != "gemm") {
    fail_usage("bench",
               "can measure limits, gemm, attention, rollout and exactness, but not \"{}\"",
               arguments.what);
  }
  const DeviceArguments& device = arguments.device;
  bench::GemmOptions options;
  options.isa = cpu_isa(device);
  options.num_threads = ThreadPool(device.threads).num_threads();
  const bench::GemmReport report = bench::measure_gemm(options);
  print(arguments.json ? json(report, options.num_threads) : table(report, options.num_threads));
  return 0;
}

}  // namespace octet::app
