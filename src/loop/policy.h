// A policy ready to run: the model with its weights, one decoder, one output head, one pool of
// pages, and the text side (tokenizer, chat template, end tokens) of its folder.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/model_config.h"
#include "model/decoder.h"
#include "model/loader.h"
#include "model/output_head.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace octet::loop {

struct PolicyOptions {
  model::Precision precision;
  bool fp8_kv = false;
  model::Training training = model::Training::kNone;
  std::optional<io::LoraConfig> lora;
  int64_t max_seq_length = 2048;    // positions of one sequence
  int64_t max_batch_tokens = 2048;  // new tokens of one forward
  int64_t max_sequences = 64;       // sequences of one forward
  int64_t kv_tokens = 0;            // tokens the pool holds; 0: max_sequences × max_seq_length
  bool shadow = false;              // BF16 reference passes (Calibrated Clipping)
  // Of one chunk of the output head, unless the tokens that a step samples, up to 512, need more.
  int64_t logits_bytes = int64_t{64} << 20;
};

// What belongs to a model besides its weights.
struct TextSide {
  std::optional<text::Tokenizer> tokenizer;  // none: ids only, nothing is masked
  std::optional<text::ChatTemplate> chat_template;
  std::vector<int32_t> stop_ids;  // end tokens of generation_config, config and tokenizer
  io::GenerationConfig generation;

  // Ids below this are the tokenizer's; all of the model's rows without one.
  int64_t num_known(const io::ModelConfig& config) const;
  // The text of sampled ids, without special tokens and without the stop string that ended it.
  std::string completion_text(std::span<const int32_t> ids, std::string_view stop_string) const;
  // A conversation as text; Error where the folder has no tokenizer or template.
  std::string render(const Json& messages, bool add_generation_prompt, const Json* tools,
                     const Json* kwargs) const;
};
// Reads what the folder holds; missing tokenizer files are no error.
TextSide read_text_side(const std::string& folder, const io::ModelConfig& config);

inline constexpr std::string_view kReferenceLabel = "KL reference";

// One line of the memory plan.
struct PlanEntry {
  std::string label;
  int64_t num_bytes = 0;
};

class Policy {
 public:
  // Only allocates: weights are zero until one of the loader's functions fills them.
  Policy(tensor::Allocator& allocator, const io::ModelConfig& config, int64_t num_known,
         const PolicyOptions& options);

  model::Model& model() { return *model_; }
  model::Decoder& decoder() { return *decoder_; }
  model::OutputHead& head() { return *head_; }
  model::KvStore& pages() { return *pages_; }
  // BF16 pages of the reference passes: the pool itself where that is BF16; null without `shadow`.
  model::KvStore* shadow_pages() {
    return shadow_ ? shadow_.get() : use_pool_as_shadow_ ? pages_.get() : nullptr;
  }
  // Gives the pools' memory back while no page is in use, and takes it again where it was, zeroed.
  void unmap_pages();
  void map_pages();

 private:
  std::unique_ptr<model::Model> model_;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<model::OutputHead> head_;
  std::unique_ptr<model::KvStore> pages_, shadow_;
  bool use_pool_as_shadow_ = false;
};

// What Policy's constructor would allocate, without memory behind it; given a backend, in its pages
// and with its workspaces.
std::vector<PlanEntry> plan_memory(const io::ModelConfig& config, int64_t num_known,
                                   const PolicyOptions& options, ops::Backend* backend = nullptr);
// The largest extents that the backend's ops will see.
ops::WorkspaceShape workspace_shape(Policy& policy, const PolicyOptions& options);
// The backend's workspaces for them.
std::vector<PlanEntry> plan_workspaces(ops::Backend& backend, const ops::WorkspaceShape& shape);
// Adds what Backend::prepare takes, before the rest is there, beyond the rest.
void plan_preparing(std::vector<PlanEntry>& plan, ops::Backend& backend,
                    const ops::WorkspaceShape& shape);
// Backend::prepare for a policy that is still to be made.
void prepare_backend(ops::Backend& backend, const io::ModelConfig& config, int64_t num_known,
                     const PolicyOptions& options);
int64_t plan_total(const std::vector<PlanEntry>& plan);
// What makes a part of a plan smaller, in the user's words; empty: nothing does.
struct PlanAdvice {
  std::string weights;    // with gradients and the optimiser's state
  std::string reference;  // of KL
  std::string lengths;    // KV pages, activations and whatever else grows with the tokens at once
  std::string pages;      // KV pages alone
  std::string limit;      // what holds more
};
// Error naming the plan unless it fits the limit (0: none), with the advice for the largest parts
// first; for the weights only, where they alone do not fit.
void check_plan(const std::vector<PlanEntry>& plan, int64_t limit_bytes, const PlanAdvice& advice);
std::string format_plan(const std::vector<PlanEntry>& plan);

// The precision of a checkpoint that is FP8 already, or `fallback`.
model::Precision checkpoint_precision(const io::ModelConfig& config,
                                      const model::Precision& fallback);

}  // namespace octet::loop
