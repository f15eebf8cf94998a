#include "app/commands.h"
#include "app/output.h"
#include "base/error.h"
#include "io/gguf_import.h"

namespace octet::app {

int run_import(const ImportArguments& arguments) {
  io::ImportOptions options;
  if (arguments.dtype == "bf16") {
    options.dtype = io::ImportDtype::kBFloat16;
  } else if (arguments.dtype == "f32") {
    options.dtype = io::ImportDtype::kFloat32;
  } else if (!arguments.dtype.empty()) {
    fail_usage("--dtype", "must be bf16 or f32, but is \"{}\"", arguments.dtype);
  }
  io::import_gguf(arguments.source, arguments.destination, options);
  print_line("wrote " + arguments.destination);
  return 0;
}

}  // namespace octet::app
