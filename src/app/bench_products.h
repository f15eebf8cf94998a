// `octet bench gemm` on a CUDA device: the products of a known model's layer.
#pragma once

#include "app/arguments.h"

namespace octet::app {

int run_bench_products(const BenchArguments& arguments);

}  // namespace octet::app
