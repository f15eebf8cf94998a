#include "app/commands.h"
#include "base/error.h"

namespace octet::app {

int run_bench(const BenchArguments& arguments) {
  fail_usage("bench", "\"{}\" is not measured", arguments.what);
}

}  // namespace octet::app
