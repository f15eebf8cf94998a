// A small decoder with random weights, on the CPU unless said, whole: model, decoder, head, pages.
#pragma once

#include <bit>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "base/rng.h"
#include "model/loader.h"
#include "model/output_head.h"
#include "model/scoring.h"
#include "train/micro_batch.h"

namespace octet::test {

// Widths that are no multiples of 128, and heads × head width that is not the hidden width.
struct TinyOptions {
  int64_t hidden = 96, heads = 4, kv_heads = 2, head_dim = 32, inner = 200, vocab = 61, layers = 2;
  bool tied = false, qk_norm = false, bias = false;
  int64_t window = 0;
  model::Precision precision;
  model::Training training = model::Training::kFull;
  int64_t lora_rank = 0;  // 0: no adapters
  std::string lora_pattern;
  std::map<std::string, int64_t> rank_pattern;
  bool zero_b = false;  // adapters as a run starts them
  bool fp8_kv = false, shadow = false;
  int threads = 2;
  int64_t max_tokens = 512, max_sequences = 32, max_context = 64, num_pages = 200;
  int64_t chunk_rows = 48, num_known = 59;
  uint64_t seed = 3;

  io::ModelConfig config() const {
    io::ModelConfig c;
    c.model_type = qk_norm ? "qwen3" : "llama";
    c.vocab_size = vocab;
    c.hidden_size = hidden;
    c.intermediate_size = inner;
    c.num_hidden_layers = layers;
    c.num_attention_heads = heads;
    c.num_key_value_heads = kv_heads;
    c.head_dim = head_dim;
    c.max_position_embeddings = 4096;
    c.tie_word_embeddings = tied;
    c.qk_norm = qk_norm;
    c.attention_bias = c.attention_output_bias = c.mlp_bias = bias;
    c.sliding_window.assign(static_cast<size_t>(layers), window);
    return c;
  }
  std::optional<io::LoraConfig> lora() const {
    if (lora_rank == 0) return std::nullopt;
    io::LoraConfig config;
    config.r = lora_rank;
    config.lora_alpha = 2.0 * static_cast<double>(lora_rank);
    config.target_pattern = lora_pattern;
    config.rank_pattern = rank_pattern;
    return config;
  }
};

struct TinyPolicy {
  explicit TinyPolicy(const TinyOptions& o, std::unique_ptr<ops::Backend> where = nullptr)
      : options(o),
        backend(where ? std::move(where) : cpu::make_cpu_backend({.num_threads = o.threads})),
        model(backend->allocator(), o.config(), o.precision, o.training, o.lora()),
        decoder(backend->allocator(), model,
                {.max_tokens = o.max_tokens,
                 .max_sequences = o.max_sequences,
                 .max_context = o.max_context,
                 .training = o.training != model::Training::kNone,
                 .shadow = o.shadow}),
        head(backend->allocator(), model, o.chunk_rows, o.max_tokens, o.num_known,
             o.training != model::Training::kNone),
        pages(backend->allocator(), o.config(),
              o.fp8_kv              ? tensor::DType::kE4M3
              : o.precision.float32 ? tensor::DType::kF32
                                    : tensor::DType::kBF16,
              o.num_pages) {
    fill_random(o.seed);
  }

  // Every parameter away from its special values: norms are not 1, biases and B are not 0.
  void fill_random(uint64_t seed) {
    model::init_weights(*backend, model, seed, 0.1);
    if (options.lora_rank > 0) model::init_adapters(*backend, model, seed);
    uint32_t index = 0;
    for (model::Parameter& p : model.weights().parameters()) {
      ++index;
      const bool b = p.kind == model::ParameterKind::kLora && p.name.ends_with("B.weight");
      if (p.shape.rank() == 2 && (!b || options.zero_b)) continue;
      const float centre = p.kind == model::ParameterKind::kNorm ? 1.0f : 0.0f;
      std::vector<float> values(static_cast<size_t>(p.shape.num_elements()));
      RandomSequence random({.seed = seed, .prompt = index}, RngUse::kTask);
      for (float& value : values) value = centre + 0.4f * (random.next_unit() - 0.5f);
      set(p, values);
    }
  }
  void set(model::Parameter& p, const std::vector<float>& values) {
    tensor::Buffer staging =
        backend->allocator().allocate(tensor::DType::kF32, p.shape, "test values");
    const tensor::TensorView view = staging.view(tensor::DType::kF32, p.shape);
    backend->upload(values.data(), view);
    model.weights().assign(*backend, p, view);
  }
  model::Parameter& parameter(const std::string& name) {
    model::Parameter* found = model.weights().find(name);
    if (found == nullptr) throw std::runtime_error("no parameter " + name);
    return *found;
  }
  train::Policy policy() { return {decoder, head, pages}; }

  TinyOptions options;
  std::unique_ptr<ops::Backend> backend;
  model::Model model;
  model::Decoder decoder;
  model::OutputHead head;
  model::KvStore pages;
};

inline std::vector<float> floats_of(ops::Backend& backend, const tensor::TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  backend.download(view, values.data());
  return values;
}
inline std::vector<uint8_t> bytes_of(ops::Backend& backend, const tensor::TensorView& view) {
  if (view.empty()) return {};
  std::vector<uint8_t> bytes(static_cast<size_t>(view.num_bytes()));
  backend.download(view, bytes.data());
  return bytes;
}
// Everything that a step may change in a model: masters and what the forward reads.
inline std::vector<std::vector<uint8_t>> weight_bytes(TinyPolicy& p) {
  std::vector<std::vector<uint8_t>> all;
  for (const model::Parameter& parameter : p.model.weights().parameters()) {
    for (const tensor::TensorView& view : {parameter.master, parameter.dense,
                                           parameter.quantized.codes, parameter.quantized.scales}) {
      all.push_back(bytes_of(*p.backend, view));
    }
  }
  return all;
}

inline std::vector<int32_t> random_ids(int64_t length, uint32_t salt, int64_t num_known = 59) {
  RandomSequence random({.seed = 77, .prompt = salt}, RngUse::kTask);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) {
    ids.push_back(static_cast<int32_t>(random.next_below(static_cast<uint32_t>(num_known))));
  }
  return ids;
}

inline void expect_equal_bits(const std::vector<float>& a, const std::vector<float>& b,
                              const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i]))
        << what << ", token " << i << ": " << a[i] << " and " << b[i];
  }
}

}  // namespace octet::test
