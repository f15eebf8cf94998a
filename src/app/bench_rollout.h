// `octet bench rollout` and `octet bench exactness`: a model of a known shape with random weights.
#pragma once

#include "app/arguments.h"

namespace octet::app {

int run_bench_rollout(const BenchArguments& arguments);

}  // namespace octet::app
