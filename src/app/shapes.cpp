#include "app/shapes.h"

#include <vector>

#include <fmt/format.h>

#include "base/error.h"

namespace octet::app {
namespace {

struct Shape {
  const char* name;
  const char* model_type;
  int64_t vocab, hidden, inner, layers, heads, kv_heads, head_dim;
  bool tied, qk_norm;
  double theta;
};

constexpr Shape kShapes[] = {
    {"qwen3-0.6b", "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, true, true, 1e6},
    {"qwen3-1.7b", "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, true, true, 1e6},
    {"qwen3-8b", "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, false, true, 1e6},
    {"qwen3-14b", "qwen3", 151936, 5120, 17408, 40, 40, 8, 128, false, true, 1e6},
    {"qwen3-32b", "qwen3", 151936, 5120, 25600, 64, 64, 8, 128, false, true, 1e6},
    {"llama3-8b", "llama", 128256, 4096, 14336, 32, 32, 8, 128, false, false, 5e5},
    {"smollm2-135m", "llama", 49152, 576, 1536, 30, 9, 3, 64, true, false, 1e5},
};

}  // namespace

io::ModelConfig shape_named(const std::string& name, int64_t num_layers) {
  std::vector<std::string> known;
  for (const Shape& shape : kShapes) {
    known.emplace_back(shape.name);
    if (name != shape.name) continue;
    if (num_layers > shape.layers) {
      fail_usage("--layers", "{} has {}, but {} are asked for", name, shape.layers, num_layers);
    }
    io::ModelConfig config;
    config.model_type = shape.model_type;
    config.vocab_size = shape.vocab;
    config.hidden_size = shape.hidden;
    config.intermediate_size = shape.inner;
    config.num_hidden_layers = num_layers > 0 ? num_layers : shape.layers;
    config.num_attention_heads = shape.heads;
    config.num_key_value_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    config.max_position_embeddings = 40960;
    config.tie_word_embeddings = shape.tied;
    config.qk_norm = shape.qk_norm;
    config.rope.theta = shape.theta;
    config.sliding_window.assign(static_cast<size_t>(config.num_hidden_layers), 0);
    return config;
  }
  fail_usage("--shape", "must be one of {}, but is \"{}\"", fmt::join(known, ", "), name);
}

}  // namespace octet::app
