// From hidden states to log-probabilities, by chunks of tokens: [tokens, vocabulary] never exists.
#pragma once

#include <span>
#include <vector>

#include "model/model.h"

namespace octet::model {

struct TopToken {
  int32_t id = 0;
  float logit = 0;  // before the temperature
};

struct TokenScores {
  std::vector<float> log_probs;  // of the targets, nats
  std::vector<float> entropies;  // of the distributions, nats
  std::vector<TopToken> top{};     // num_top of each distribution, the likeliest first
};

class OutputHead {
 public:
  // chunk_rows tokens at a time; ids from num_known up are masked. max_tokens bounds T.
  OutputHead(tensor::Allocator& allocator, const Model& model, int64_t chunk_rows,
             int64_t max_tokens, int64_t num_known, bool training);

  int64_t num_known() const { return num_known_; }
  int64_t chunk_rows() const { return chunk_rows_; }

  // Logits F32 [rows.size(), V] of the given rows of hidden [T, H]; at most chunk_rows of them,
  // valid until the next call.
  tensor::TensorView logits(ops::Backend& backend, const tensor::TensorView& hidden,
                            std::span<const int32_t> rows);

  // Scores targets[i] under row rows[i] of hidden, at the given temperature. With `num_top` ≤
  // num_known the logits go to the host, which picks the likeliest (for looking at a few texts).
  TokenScores score(ops::Backend& backend, const tensor::TensorView& hidden,
                    std::span<const int32_t> rows, std::span<const int32_t> targets,
                    float temperature, int64_t num_top = 0);

  // For the same arguments: writes d_hidden [T, H] (rows not named are zero) and adds the gradients
  // of head and embedding. d_log_probs and d_entropies (or empty) per entry of rows, which must
  // be ascending.
  void backward(ops::Backend& backend, const tensor::TensorView& hidden,
                std::span<const int32_t> rows, std::span<const int32_t> targets, float temperature,
                std::span<const float> d_log_probs, std::span<const float> d_entropies,
                const tensor::TensorView& d_hidden);

 private:
  // The given rows side by side; leaves them in rows_.
  tensor::TensorView gather(ops::Backend& backend, const tensor::TensorView& hidden,
                            std::span<const int32_t> rows);

  const Model& model_;
  int64_t chunk_rows_;
  int64_t num_known_;
  std::vector<tensor::Buffer> buffers_;
  tensor::TensorView rows_, targets_;             // [chunk] I32
  tensor::TensorView gathered_, d_gathered_;      // [chunk, H]
  tensor::TensorView logits_, d_logits_;          // [chunk, V]
  tensor::TensorView log_probs_, entropies_;      // [chunk] F32
  tensor::TensorView d_log_probs_, d_entropies_;  // [chunk] F32
};

}  // namespace octet::model
