// Continuous batching over KV pages: many prompts, several samples of each, one decoder.
//
// A step takes one token of every running sequence and fills the rest of its budget with prompt
// tokens. The prompt of a group is computed once: its samples share its pages and copy the last,
// partly filled one when they write to it. They stand side by side in the batch, so that shared
// pages may be read once. When pages run out the youngest sequence gives its own back and is
// computed again later.
//
// On an asynchronous backend a step is queued before the ids of the one before it are fetched: they
// reach it on the device. A sequence that turns out to have ended was then computed once more, for
// nothing. None of this changes a byte of what is sampled.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "model/decoder.h"
#include "model/output_head.h"
#include "text/tokenizer.h"

namespace octet::rollout {

struct SamplingOptions {
  float temperature = 1.0f;  // 0: greedy, with log-probabilities at temperature 1
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;  // 0: all
  int64_t max_new_tokens = 256;
  std::vector<int32_t> stop_ids;  // end tokens; the one that stopped is the last id
  std::vector<std::string> stop;  // strings that end the text; needs a tokenizer
  bool ignore_eos = false;        // stop_ids do not stop
};

// One prompt. `key` (seed, step, prompt) and the index of the sample decide every random number.
struct PromptRequest {
  std::vector<int32_t> ids;
  int64_t num_samples = 1;
  RngKey key;
};

enum class FinishReason { kStop, kLength };

struct Completion {
  int64_t prompt = 0;  // index of the request
  int64_t sample = 0;
  std::vector<int32_t> ids;
  std::vector<float> log_probs;  // under the full, temperature-scaled distribution, nats
  FinishReason finish_reason = FinishReason::kLength;
  std::string stop_string;  // the stop string that ended it, if one did
  int64_t policy_version = 0;
};

struct EngineOptions {
  int64_t max_num_seqs = 256;    // running at once
  int64_t max_batch_tokens = 0;  // new tokens of one step; 0: the decoder's limit
  // Whether a step is queued before the last one's ids are known; by default where that pays.
  std::optional<bool> look_ahead{};
};

// Of the steps whose ids have been fetched.
struct EngineStats {
  int64_t num_steps = 0;
  int64_t num_prompt_tokens = 0;  // computed, preempted ones again
  int64_t num_sampled_tokens = 0;
  int64_t num_preemptions = 0;
};

class Engine {
 public:
  // All borrowed; `tokenizer` may be null where no stop strings are used.
  Engine(ops::Backend& backend, model::Decoder& decoder, model::OutputHead& head,
         model::KvStore& pages, const text::Tokenizer* tokenizer, const EngineOptions& options);

  // What an engine on these allocates, for the memory plan.
  static int64_t num_bytes(const model::Decoder& decoder, const model::OutputHead& head);

  // Called after every step with the finished completions and sampled tokens so far.
  using Progress = std::function<void(int64_t num_finished, int64_t num_tokens)>;
  // Called with each completion as it ends, in the order of ending.
  using OnFinished = std::function<void(const Completion&)>;

  // All completions, by prompt, then sample. A prompt that is empty or leaves no room for a new
  // token in the decoder's context is an Error naming it; so is a sequence that needs more pages
  // than the pool has. Throws Interrupted when an interrupt was requested. All pages are free again
  // afterwards.
  std::vector<Completion> run(std::span<const PromptRequest> requests,
                              const SamplingOptions& sampling, const Progress& progress = {},
                              const OnFinished& on_finished = {});

  const EngineStats& stats() const { return stats_; }

 private:
  ops::Backend& backend_;
  model::Decoder& decoder_;
  model::OutputHead& head_;
  model::KvStore& pages_;
  const text::Tokenizer* tokenizer_;
  EngineOptions options_;
  EngineStats stats_;
  tensor::Buffer sampled_;
};

}  // namespace octet::rollout
