#include "loop/policy.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"

namespace octet::loop {
namespace {

namespace fs = std::filesystem;
using tensor::DType;

constexpr int64_t kSampledRows = 512;  // of a step of decoding: one chunk of the output head

bool has_tokenizer(const std::string& folder) {
  return fs::exists(fs::path(folder) / "tokenizer.json") ||
         fs::exists(fs::path(folder) / "tokenizer.json.gz");
}

}  // namespace

int64_t TextSide::num_known(const io::ModelConfig& config) const {
  return tokenizer ? std::min(tokenizer->size(), config.vocab_size) : config.vocab_size;
}

std::string TextSide::completion_text(std::span<const int32_t> ids,
                                      std::string_view stop_string) const {
  if (!tokenizer) return "";
  std::string text = tokenizer->decode(ids, {.skip_special_tokens = true});
  // A stop string with a special token in it does not stand in this text.
  if (!stop_string.empty()) text.erase(std::min(text.size(), text.find(stop_string)));
  return text;
}

std::string TextSide::render(const Json& messages, bool add_generation_prompt, const Json* tools,
                             const Json* kwargs) const {
  if (!tokenizer)
    fail("messages", "conversations need a tokenizer, but the model's folder has none; give ids");
  if (!chat_template) {
    fail("messages",
         "conversations need a chat template, but the model's folder has none; give text "
         "or a template file");
  }
  const auto token_text = [&](std::optional<int32_t> id) {
    return id ? tokenizer->id_to_token(*id) : std::string_view();
  };
  return chat_template->render({.messages = messages,
                                .add_generation_prompt = add_generation_prompt,
                                .tools = tools,
                                .kwargs = kwargs,
                                .bos_token = token_text(tokenizer->bos_id()),
                                .eos_token = token_text(tokenizer->eos_id())});
}

TextSide read_text_side(const std::string& folder, const io::ModelConfig& config) {
  TextSide side;
  side.generation = io::read_generation_config(folder);
  side.stop_ids = io::stop_token_ids(config, side.generation);
  if (!has_tokenizer(folder)) return side;
  side.tokenizer = text::Tokenizer::load(folder);
  if (const std::optional<int32_t> eos = side.tokenizer->eos_id();
      eos && std::find(side.stop_ids.begin(), side.stop_ids.end(), *eos) == side.stop_ids.end()) {
    side.stop_ids.push_back(*eos);
  }
  if (const std::string* source = side.tokenizer->chat_template()) {
    side.chat_template = text::ChatTemplate::parse(*source, folder + " (chat template)");
  }
  return side;
}

Policy::Policy(tensor::Allocator& allocator, const io::ModelConfig& config, int64_t num_known,
               const PolicyOptions& options) {
  const bool training = options.training != model::Training::kNone;
  model_ = std::make_unique<model::Model>(allocator, config, options.precision, options.training,
                                          options.lora);
  decoder_ =
      std::make_unique<model::Decoder>(allocator, *model_,
                                       model::DecoderLimits{.max_tokens = options.max_batch_tokens,
                                                            .max_sequences = options.max_sequences,
                                                            .max_context = options.max_seq_length,
                                                            .training = training,
                                                            .shadow = options.shadow});
  const int64_t chunk_rows =
      std::max(options.logits_bytes / (4 * std::max<int64_t>(1, config.vocab_size)),
               std::min(options.max_sequences, kSampledRows));
  head_ = std::make_unique<model::OutputHead>(allocator, *model_, chunk_rows,
                                              options.max_batch_tokens, num_known, training);
  const DType dense_kv = options.precision.float32 ? DType::kF32 : DType::kBF16;
  const int64_t tokens =
      options.kv_tokens > 0 ? options.kv_tokens : options.max_sequences * options.max_seq_length;
  const int64_t num_pages = model::KvStore::pages_for(tokens);
  pages_ = std::make_unique<model::KvStore>(allocator, config,
                                            options.fp8_kv ? DType::kE4M3 : dense_kv, num_pages);
  if (!options.shadow) return;
  use_pool_as_shadow_ = !options.fp8_kv;
  if (options.fp8_kv) {
    // A pass holds one call's sequences at a time: its tokens, and a page's tail for each.
    const int64_t shadow_pages =
        std::min(num_pages,
                 model::KvStore::pages_for(2 * options.max_batch_tokens + options.max_seq_length) +
                     options.max_sequences);
    shadow_ = std::make_unique<model::KvStore>(allocator, config, dense_kv, shadow_pages);
  }
}

void Policy::unmap_pages() {
  pages_->unmap();
  if (shadow_) shadow_->unmap();
}

void Policy::map_pages() {
  pages_->map();
  if (shadow_) shadow_->map();
}

ops::WorkspaceShape workspace_shape(Policy& policy, const PolicyOptions& options) {
  const io::ModelConfig& config = policy.model().config();
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t attention = policy.model().attention_width();
  const bool fp8 = options.precision.fp8();
  ops::WorkspaceShape shape{
      .max_tokens = options.max_batch_tokens,
      .max_sequences = options.max_sequences,
      .max_context = options.max_seq_length,
      .query_heads = config.num_attention_heads,
      .kv_heads = config.num_key_value_heads,
      .head_dim = config.head_dim,
      .linears = {{policy.model().qkv_width(), hidden},
                  {hidden, attention},
                  {2 * inner, hidden},
                  {hidden, inner}},
      .head = {config.vocab_size, hidden},
      .head_rows = policy.head().chunk_rows(),
      .fp8 = fp8,
      .block_scales = fp8 && options.precision.scales == model::WeightScales::kBlock,
      .training = options.training != model::Training::kNone};
  // Groups with a bias are multiplied part by part (model::Projector).
  if (config.attention_bias) {
    shape.linears.push_back({attention, hidden});
    shape.linears.push_back({config.num_key_value_heads * config.head_dim, hidden});
  }
  if (config.mlp_bias) shape.linears.push_back({inner, hidden});
  return shape;
}

std::vector<PlanEntry> plan_workspaces(ops::Backend& backend, const ops::WorkspaceShape& shape) {
  std::vector<PlanEntry> plan;
  for (const ops::Workspace& workspace : backend.workspaces(shape)) {
    plan.push_back({workspace.label, workspace.num_bytes});
  }
  return plan;
}

void plan_preparing(std::vector<PlanEntry>& plan, ops::Backend& backend,
                    const ops::WorkspaceShape& shape) {
  const int64_t preparing = backend.prepare_bytes(shape), all = plan_total(plan);
  if (preparing > all) plan.push_back({"search for products", preparing - all});
}

void prepare_backend(ops::Backend& backend, const io::ModelConfig& config, int64_t num_known,
                     const PolicyOptions& options) {
  tensor::PlanningAllocator allocator;
  Policy policy(allocator, config, num_known, options);
  backend.prepare(workspace_shape(policy, options));
}

std::vector<PlanEntry> plan_memory(const io::ModelConfig& config, int64_t num_known,
                                   const PolicyOptions& options, ops::Backend* backend) {
  tensor::PlanningAllocator allocator(backend == nullptr ? 1 : backend->allocator().page_bytes());
  Policy policy(allocator, config, num_known, options);
  std::vector<PlanEntry> plan;
  for (const auto& entry : allocator.entries()) plan.push_back({entry.label, entry.num_bytes});
  if (backend == nullptr) return plan;
  const ops::WorkspaceShape shape = workspace_shape(policy, options);
  for (PlanEntry& entry : plan_workspaces(*backend, shape)) plan.push_back(entry);
  plan_preparing(plan, *backend, shape);
  return plan;
}

int64_t plan_total(const std::vector<PlanEntry>& plan) {
  int64_t total = 0;
  for (const PlanEntry& entry : plan) total += entry.num_bytes;
  return total;
}

std::string format_plan(const std::vector<PlanEntry>& plan) {
  std::string text;
  for (const PlanEntry& entry : plan) {
    text += fmt::format("  {:<24}{:>12}\n", entry.label, format_bytes(entry.num_bytes));
  }
  return text + fmt::format("  {:<24}{:>12}\n", "total", format_bytes(plan_total(plan)));
}

void check_plan(const std::vector<PlanEntry>& plan, int64_t limit_bytes, const PlanAdvice& advice) {
  const int64_t total = plan_total(plan);
  if (limit_bytes <= 0 || total <= limit_bytes) return;
  int64_t weights = 0, reference = 0, pages = 0;
  for (const PlanEntry& entry : plan) {
    const std::string& label = entry.label;
    if (label.ends_with("weights") || label == "gradients" || label == "optimiser" ||
        label == "loading") {
      weights += entry.num_bytes;
    } else if (label == kReferenceLabel) {
      reference += entry.num_bytes;
    } else if (label == model::KvStore::kLabel) {
      pages += entry.num_bytes;
    }
  }
  std::vector<std::pair<int64_t, std::string>> parts = {{weights, advice.weights}};
  std::string helps;
  if (weights > limit_bytes) {
    helps = fmt::format("{} of it are there before the first token; ", format_bytes(weights));
  } else {
    parts.emplace_back(reference, advice.reference);
    parts.emplace_back(total - weights - reference, advice.lengths);
    parts.emplace_back(pages, advice.pages);
    std::erase_if(parts, [&](const auto& part) { return part.first < total / 10; });
    std::ranges::sort(parts, std::greater());
  }
  helps += "what helps: ";
  for (const auto& [num_bytes, text] : parts) helps += text.empty() ? "" : text + ", ";
  fail("memory", "{} are allowed, but the plan needs {}:\n{}{}{}", format_bytes(limit_bytes),
       format_bytes(total), format_plan(plan), helps, advice.limit);
}

model::Precision checkpoint_precision(const io::ModelConfig& config,
                                      const model::Precision& fallback) {
  if (!config.quantization) return fallback;
  model::Precision precision = fallback;
  precision.flow = model::Flow::kFp8Lora;
  precision.scales =
      config.quantization->weights == tensor::Granularity::kTensor ? model::WeightScales::kTensor
      : config.quantization->weights == tensor::Granularity::kRow  ? model::WeightScales::kChannel
                                                                   : model::WeightScales::kBlock;
  return precision;
}

}  // namespace octet::loop
