// `octet bench limits` and `octet bench attention`.
#pragma once

#include "app/arguments.h"

namespace octet::app {

int run_bench_limits(const BenchArguments& arguments);
int run_bench_attention(const BenchArguments& arguments);

}  // namespace octet::app
