#include "app/bench_products.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/output.h"
#include "app/shapes.h"
#ifdef OCTET_CUDA
#include "backend/cuda/product_bench.h"
#endif
#include "base/error.h"

namespace octet::app {

#ifdef OCTET_CUDA

namespace {

using cuda::ProductFormat;

struct Named {
  const char* name;
  int64_t rows, depth;
};

constexpr int64_t kTokens[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

std::vector<Named> products_of(const io::ModelConfig& config) {
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  return {{"qkv", queries + 2 * keys, config.hidden_size},
          {"o", config.hidden_size, queries},
          {"gate_up", 2 * config.intermediate_size, config.hidden_size},
          {"down", config.hidden_size, config.intermediate_size},
          {"head", config.vocab_size, config.hidden_size}};
}

// In the words of the configuration; `tensor` and `channel` are one product.
const char* format_name(ProductFormat format) {
  switch (format) {
    case ProductFormat::kBF16:
      return "bf16";
    case ProductFormat::kScaled:
      return "channel";
    case ProductFormat::kBlocks:
      return "block";
  }
  return "";
}

}  // namespace

int run_bench_products(const BenchArguments& arguments) {
  const io::ModelConfig config = shape_named(arguments.shape, arguments.num_layers);
  const std::vector<Named> named = products_of(config);
  std::vector<cuda::ProductKey> keys;
  for (const ProductFormat format :
       {ProductFormat::kScaled, ProductFormat::kBlocks, ProductFormat::kBF16}) {
    for (const Named& product : named) {
      const bool head = &product == &named.back();
      if (head && format != ProductFormat::kBF16) continue;  // always BF16, to F32 logits
      for (const int64_t tokens : kTokens) {
        if (tokens > arguments.batch_tokens) continue;
        if (head && tokens > 512) continue;  // logits come in chunks of few tokens
        if (format == ProductFormat::kBlocks && tokens == 1) continue;  // the own kernel's
        keys.push_back({format, !head, product.rows, product.depth, tokens});
      }
    }
  }
  print(fmt::format("{:<8} {:<8} {:>6} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}  {}\n", "product",
                    "format", "tokens", "us:", "own", "heuristic", "searched", "limit", "of limit",
                    "kernel"));
  cuda::measure_products(
      cuda_options(arguments.device), keys, [&](const cuda::ProductTiming& timing) {
        const auto& [key, choice, memory, compute] = timing;
        const Named& product = *std::ranges::find_if(named, [&](const Named& one) {
          return one.rows == key.rows && one.depth == key.depth;
        });
        const double limit = std::max(memory, compute);
        print(fmt::format(
            "{:<8} {:<8} {:>6} {:>8} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>8.0f}%  {}\n",
            product.name, format_name(key.format), key.tokens,
            memory > compute ? "memory" : "compute", choice.own_microseconds,
            choice.heuristic_microseconds, choice.microseconds, limit,
            100 * limit / choice.microseconds, choice.description));
      });
  return 0;
}

#else

int run_bench_products(const BenchArguments&) {
  fail_usage("bench gemm", "this build has no CUDA backend; use --device cpu");
}

#endif

}  // namespace octet::app
