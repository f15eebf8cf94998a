// Log-probabilities, entropy and sampling from logits. C rows, V columns.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/tensor.h"

namespace octet::ops {

// With z = logits / temperature over the known ids (v < num_known): log_probs[c] = z[targets[c]] −
// logsumexp(z), entropy[c] = −Σ p log p, both in nats, in one fixed order. logits [C, V] F32,
// targets [C] I32 (−1: log_probs[c] = 0), log_probs and entropy [C] F32 (either may be empty).
// temperature > 0. A target that is not known gets −infinity.
struct LogProbsArgs {
  tensor::TensorView logits;
  tensor::TensorView targets;
  tensor::TensorView log_probs;
  tensor::TensorView entropy;
  float temperature = 1.0f;
  int64_t num_known = 0;
};

// dlogits[c, v] = (dlog_probs[c] (1[v = target] − p[v]) − dentropy[c] p[v] (log p[v] + H)) /
// temperature, 0 for unknown ids. dlogits [C, V] BF16|F32, may share memory with F32 logits of the
// same dtype. dlog_probs, dentropy [C] F32 (dentropy may be empty).
struct LogProbsBackwardArgs {
  tensor::TensorView logits;
  tensor::TensorView targets;
  tensor::TensorView dlog_probs;
  tensor::TensorView dentropy;
  tensor::TensorView dlogits;
  float temperature = 1.0f;
  int64_t num_known = 0;
};

// One row's rule. temperature 0 is greedy: the largest logit, of equals the smallest id; its
// log-probability is that at temperature 1. Otherwise, on p = softmax(logits / temperature) over
// the known ids: top_k keeps the k largest (0: all), then top_p the smallest set, from the largest
// down, whose share of what top_k kept reaches top_p, then min_p those with p ≥ min_p × the
// largest. Equal p count by id. The id is drawn with u = unit_float(random): the first, in order of
// id, whose cumulated kept p exceeds u × (kept sum).
struct SampleParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  uint32_t random = 0;
};

// ids [C] I32; log_probs [C] F32 under the full temperature-scaled distribution, the same bytes as
// LogProbsArgs gives for that id; kept_log_probs [C] F32 under the kept set, or empty.
struct SampleArgs {
  tensor::TensorView logits;
  std::span<const SampleParams> params;  // host, C entries
  tensor::TensorView ids;
  tensor::TensorView log_probs;
  tensor::TensorView kept_log_probs;
  int64_t num_known = 0;
};

}  // namespace octet::ops
