// Scoring whole sequences: log-probabilities of given ids, in chunks that fit a decoder. The
// chunking changes no byte.
#pragma once

#include <span>
#include <vector>

#include "model/decoder.h"
#include "model/output_head.h"

namespace octet::model {

// ids[first_target …] are scored, each under what stands before it; first_target ≥ 1. With
// `last_entropy` the distribution after the last id is looked at too (one more entropy).
struct ScoringRequest {
  std::span<const int32_t> ids;
  int64_t first_target = 1;
  bool last_entropy = false;
};

// Per request log_probs of ids[first_target …] and the entropies of the distributions that they
// were drawn from. At most `max_tokens` (0: the decoder's limit) new tokens go through the decoder
// at once. `num_top` likeliest ids of each of these distributions come with their logits. Error
// where a sequence is longer than the decoder's context or needs more pages than are free.
std::vector<TokenScores> score_sequences(ops::Backend& backend, Decoder& decoder, OutputHead& head,
                                         KvStore& pages, std::span<const ScoringRequest> requests,
                                         float temperature, const ForwardMode& mode = {},
                                         int64_t max_tokens = 0, int64_t num_top = 0);

}  // namespace octet::model
