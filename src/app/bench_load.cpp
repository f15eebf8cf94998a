#include "app/bench_load.h"

#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/output.h"
#include "app/random_weights.h"
#include "app/shapes.h"
#include "base/error.h"
#include "base/strings.h"
#include "base/thread_pool.h"
#include "io/checkpoint.h"
#include "loop/policy.h"
#include "rollout/engine.h"

namespace octet::app {
namespace {

constexpr int64_t kPromptTokens = 16;

class Clock {
 public:
  // Seconds since the last call, or since the clock was made.
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Every byte of the tensors once, so that the files lie in the page cache; returns how many.
int64_t read_all(const std::string& folder) {
  constexpr int64_t kPiece = int64_t{4} << 20;
  const io::Checkpoint checkpoint(folder);
  ThreadPool pool(0);
  std::vector<std::vector<uint8_t>> buffers(static_cast<size_t>(pool.num_threads()));
  int64_t total = 0;
  for (const std::string& name : checkpoint.names()) {
    const int64_t num_bytes = checkpoint.peek(name).num_bytes();
    total += num_bytes;
    pool.parallel_for(num_bytes, kPiece, [&](int64_t begin, int64_t end, int thread) {
      std::vector<uint8_t>& buffer = buffers[static_cast<size_t>(thread)];
      buffer.resize(kPiece);
      checkpoint.read(name, begin, std::span(buffer).first(static_cast<size_t>(end - begin)));
    });
  }
  return total;
}

int64_t layer_bytes(model::Model& model) {
  int64_t bytes = 0;
  for (const model::Parameter& p : model.weights().parameters()) {
    if (p.name.starts_with("model.layers.0.")) bytes += 2 * p.shape.num_elements();
  }
  return bytes;
}

}  // namespace

int run_bench_load(const BenchArguments& arguments) {
  if (arguments.folder.empty()) {
    fail_usage("--folder", "bench load needs a folder, with room for the checkpoint");
  }
  write_random_checkpoint(arguments.folder, shape_named(arguments.shape, arguments.num_layers));
  Clock clock;
  const int64_t file_bytes = read_all(arguments.folder);
  const double read_seconds = clock.lap();

  const std::unique_ptr<ops::Backend> backend = make_backend(arguments.device);
  const double device_seconds = clock.lap();
  const io::ModelConfig config = io::read_model_config(arguments.folder);
  loop::PolicyOptions options;
  options.precision.flow = model::parse_flow(arguments.flow);
  options.precision.scales = model::parse_weight_scales(arguments.scales);
  options.max_seq_length = options.max_batch_tokens = options.kv_tokens = 2 * kPromptTokens;
  options.max_sequences = 1;
  loop::prepare_backend(*backend, config, config.vocab_size, options);
  loop::Policy policy(backend->allocator(), config, config.vocab_size, options);
  const int64_t model_bytes = backend->allocator().bytes_in_use();
  const double allocate_seconds = clock.lap();
  {
    io::Checkpoint checkpoint(arguments.folder);
    model::load_weights(*backend, policy.model(), checkpoint);
    backend->synchronize();
  }
  const double load_seconds = clock.lap();
  const int64_t peak = backend->allocator().peak_bytes();

  rollout::Engine engine(*backend, policy.decoder(), policy.head(), policy.pages(), nullptr, {});
  rollout::PromptRequest request;
  request.ids = random_prompts(1, kPromptTokens, config.vocab_size)[0];
  rollout::SamplingOptions sampling;
  sampling.max_new_tokens = 1;
  sampling.ignore_eos = true;
  const auto completions = engine.run({&request, 1}, sampling);
  const double token_seconds = clock.lap();

  const int64_t allowed = model_bytes + layer_bytes(policy.model());
  const bool good = peak <= allowed && completions[0].ids.size() == 1;
  print_line(fmt::format("{}: {} {} layers from {:.2f} GB of BF16 files, flow {} {}",
                         backend->name(), arguments.shape, config.num_hidden_layers,
                         1e-9 * static_cast<double>(file_bytes), arguments.flow, arguments.scales));
  print_line(fmt::format(
      "  first token after {:.2f} s: device {:.2f}, memory {:.2f}, load {:.2f} ({:.1f} GB/s), "
      "prompt and token {:.2f}; reading the files alone took {:.2f}",
      device_seconds + allocate_seconds + load_seconds + token_seconds, device_seconds,
      allocate_seconds, load_seconds, 1e-9 * static_cast<double>(file_bytes) / load_seconds,
      token_seconds, read_seconds));
  print_line(fmt::format("  peak while loading {}: the model {} and {}; one layer is {}: {}",
                         format_bytes(peak), format_bytes(model_bytes),
                         format_bytes(peak - model_bytes), format_bytes(allowed - model_bytes),
                         good ? "good" : "BAD"));
  return good ? 0 : 1;
}

}  // namespace octet::app
