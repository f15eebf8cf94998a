// `octet bench load`: a checkpoint of random weights from the page cache to the first token.
#pragma once

#include "app/arguments.h"

namespace octet::app {

int run_bench_load(const BenchArguments& arguments);

}  // namespace octet::app
