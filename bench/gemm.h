// How fast the linear products are, beside the limits measured in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/cpu/isa.h"

namespace octet::bench {

struct GemmShape {
  int64_t tokens;   // T
  int64_t outputs;  // N
  int64_t inputs;   // K
};

struct GemmOptions {
  cpu::Isa isa = cpu::best_isa();
  int num_threads = 1;
  double seconds_per_case = 0.1;      // at least; the best of several runs counts
  std::vector<GemmShape> shapes;      // empty: default_gemm_shapes()
  std::vector<std::string> formats;   // of f32, bf16, tensor, channel, block; empty: all
  std::vector<std::string> products;  // of forward, input_grad, weight_grad; empty: all
};

struct GemmRow {
  std::string product;
  std::string format;
  GemmShape shape;
  double seconds;        // of one call, the fastest
  double gflops;         // 2·T·N·K operations per second
  double share_of_peak;  // of measure_fma_peak × threads
  // The lower of that peak and of what the memory allows: the time to read the weight, or to read
  // and write the weight's gradient, once.
  double limit_gflops;
  bool limited_by_memory;
  double share_of_limit;
};

struct GemmReport {
  std::string backend;
  double peak_gflops;  // of one thread: the best before, between and after the products
  std::vector<GemmRow> rows;
};

std::vector<GemmShape> default_gemm_shapes();
// Throws UsageError on an unknown format or product.
GemmReport measure_gemm(const GemmOptions& options);

}  // namespace octet::bench
