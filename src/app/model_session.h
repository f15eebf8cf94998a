// A model opened for `score` and `generate`: its folder first, which turns lines into ids, then its
// weights, once it is known how long the sequences are.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "app/arguments.h"
#include "app/line_input.h"
#include "io/peft.h"
#include "loop/policy.h"

namespace octet::app {

// One line of input as ids, or why it cannot be served.
struct Prompt {
  std::vector<int32_t> ids;
  std::string where;
  std::string error;  // empty: it can
};

// Of a sequence: its tokens at its end, and those of its prompt.
struct SequenceLength {
  int64_t total, prompt;
  int64_t shared_pages() const { return prompt / model::KvStore::kPageSize; }  // with other samples
};

// Sequences at once, tokens of one forward unless training needs more, and whether the pool counts
// on samples to share their prompt's whole pages: enough while they run together.
struct BatchLimits {
  int64_t sequences, tokens;
  bool shares = false;
};

// UsageError unless a temperature is 0 or one that float32 logits survive.
void check_temperature(double temperature);

class ModelSession {
 public:
  // Reads the configs, the tokenizer and the adapter, and settles the precision. UsageError where
  // the arguments contradict each other or the checkpoint.
  explicit ModelSession(const ModelArguments& arguments);

  // Every line of the input as ids. A prompt of more than max_prompt() tokens is an error, as is an
  // empty one.
  std::vector<Prompt> read_prompts(const InputArguments& input, bool special_tokens,
                                   bool add_generation_prompt) const;
  // Positions that a sequence may have: --max-seq-length, or what the model was made for.
  int64_t max_positions() const { return max_positions_; }

  // Plans the memory for sequences of these lengths, `copies` of each, of which as many run at once
  // as --batch-size says or, where that is for the program to choose, as the limit holds; Error
  // with the plan where it does not fit. Then loads weights and adapter.
  void load(std::vector<SequenceLength> lengths, int64_t copies, bool training);

  const io::ModelConfig& config() const { return config_; }
  const loop::TextSide& text() const { return text_; }
  ops::Backend& backend() { return *backend_; }
  // Of load(), as is the number of sequences that run at once.
  loop::Policy& policy() { return *policy_; }
  int64_t batch_size() const { return policy_->decoder().limits().max_sequences; }

 private:
  // `lengths`: those that need most pages first.
  loop::PolicyOptions policy_options(std::span<const SequenceLength> lengths, int64_t copies,
                                     const BatchLimits& most, bool training) const;
  std::vector<loop::PlanEntry> plan(const loop::PolicyOptions& options) const;
  loop::PlanAdvice plan_advice(const loop::PolicyOptions& options) const;  // where it is too much
  Prompt read_prompt(const std::string& source, const std::string& where, bool special_tokens,
                     bool add_generation_prompt) const;

  ModelArguments arguments_;
  io::ModelConfig config_;
  loop::TextSide text_;
  std::optional<io::PeftAdapter> adapter_;
  model::Precision precision_;
  int64_t max_positions_ = 0;
  std::unique_ptr<ops::Backend> backend_;
  std::unique_ptr<loop::Policy> policy_;
};

}  // namespace octet::app
