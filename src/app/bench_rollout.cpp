#include "app/bench_rollout.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/bench_memory.h"
#include "app/output.h"
#include "app/random_weights.h"
#include "app/rollout_limits.h"
#include "app/shapes.h"
#include "base/error.h"
#include "base/strings.h"
#include "loop/policy.h"
#include "model/scoring.h"
#include "rollout/engine.h"

namespace octet::app {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void check_arguments(const BenchArguments& arguments) {
  const auto require = [](bool holds, const char* flag, int64_t given) {
    if (!holds) fail_usage(flag, "must be positive, but is {}", given);
  };
  require(arguments.num_prompts > 0, "--prompts", arguments.num_prompts);
  require(arguments.num_samples > 0, "--n", arguments.num_samples);
  require(arguments.prompt_tokens > 0, "--prompt-tokens", arguments.prompt_tokens);
  require(arguments.new_tokens > 0, "--new-tokens", arguments.new_tokens);
  require(arguments.batch_tokens > 0, "--batch-tokens", arguments.batch_tokens);
  require(arguments.repeat > 0, "--repeat", arguments.repeat);
}

loop::PolicyOptions policy_options(const BenchArguments& arguments) {
  const int64_t sequences = arguments.num_prompts * arguments.num_samples;
  const int64_t page = model::KvStore::kPageSize;
  loop::PolicyOptions options;
  options.precision.flow = model::parse_flow(arguments.flow);
  options.precision.scales = model::parse_weight_scales(arguments.scales);
  options.fp8_kv = arguments.kv_cache_dtype == "fp8";
  if (!options.fp8_kv && arguments.kv_cache_dtype != "bf16") {
    fail_usage("--kv-cache-dtype", "must be bf16 or fp8, but is \"{}\"", arguments.kv_cache_dtype);
  }
  if (arguments.lora_rank > 0) {
    io::LoraConfig& lora = options.lora.emplace();
    lora.r = arguments.lora_rank;
    lora.lora_alpha = 2.0 * static_cast<double>(arguments.lora_rank);
  }
  options.max_seq_length = arguments.prompt_tokens + arguments.new_tokens;
  options.max_sequences =
      arguments.max_sequences > 0 ? std::min(arguments.max_sequences, sequences) : sequences;
  options.max_batch_tokens = std::max(arguments.batch_tokens, options.max_sequences);
  // Samples of a prompt share its whole pages.
  const int64_t shared = arguments.num_samples > 1 ? arguments.prompt_tokens / page * page : 0;
  const int64_t own = model::KvStore::pages_for(options.max_seq_length - shared + 1) * page;
  options.kv_tokens = arguments.kv_tokens > 0
                          ? arguments.kv_tokens
                          : std::min(arguments.num_prompts, options.max_sequences) * shared +
                                options.max_sequences * own;
  return options;
}

// Tokens whose log-probability differs between the rollout and one scoring pass.
int64_t count_differing(ops::Backend& backend, loop::Policy& policy,
                        std::span<const rollout::PromptRequest> requests,
                        std::span<const rollout::Completion> completions, double& largest) {
  std::vector<std::vector<int32_t>> ids;
  std::vector<model::ScoringRequest> scoring;
  for (const rollout::Completion& c : completions) {
    ids.push_back(requests[static_cast<size_t>(c.prompt)].ids);
    ids.back().insert(ids.back().end(), c.ids.begin(), c.ids.end());
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto& prompt = requests[static_cast<size_t>(completions[i].prompt)].ids;
    scoring.push_back({.ids = ids[i], .first_target = static_cast<int64_t>(prompt.size())});
  }
  const std::vector<model::TokenScores> scores = model::score_sequences(
      backend, policy.decoder(), policy.head(), policy.pages(), scoring, 1.0f);
  int64_t differing = 0;
  for (size_t i = 0; i < completions.size(); ++i) {
    for (size_t j = 0; j < completions[i].log_probs.size(); ++j) {
      const float a = completions[i].log_probs[j], b = scores[i].log_probs[j];
      if (std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b)) continue;
      ++differing;
      largest = std::max(largest, std::fabs(double{a} - double{b}));
    }
  }
  return differing;
}

bool same_bits(const std::vector<rollout::Completion>& a,
               const std::vector<rollout::Completion>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return x.ids == y.ids && std::ranges::equal(x.log_probs, y.log_probs, [](float p, float q) {
             return std::bit_cast<uint32_t>(p) == std::bit_cast<uint32_t>(q);
           });
  });
}

// On a backend of its own, which goes before the model comes.
bench::DeviceLimits limits_of(const BenchArguments& arguments) {
  return bench::measure_device_limits(*make_backend(arguments.device));
}

void report_limits(const BenchArguments& arguments, const loop::PolicyOptions& options,
                   const model::Model& model, const bench::DeviceLimits& device,
                   const RolloutTimes& times, const std::string& backend) {
  const RolloutLimits limits(model,
                             {.prompts = arguments.num_prompts,
                              .samples = arguments.num_samples,
                              .prompt_tokens = arguments.prompt_tokens,
                              .new_tokens = arguments.new_tokens,
                              .batch_tokens = options.max_batch_tokens,
                              .max_sequences = options.max_sequences,
                              .fp8_kv = options.fp8_kv},
                             device);
  print_line(arguments.json ? json(limits, times, arguments, backend) : describe(limits, times));
}

}  // namespace

int run_bench_rollout(const BenchArguments& arguments) {
  check_arguments(arguments);
  const std::unique_ptr<ops::Backend> backend = make_backend(arguments.device);
  const io::ModelConfig config = shape_named(arguments.shape, arguments.num_layers);
  const loop::PolicyOptions options = policy_options(arguments);
  const std::vector<loop::PlanEntry> plan = plan_rollout(*backend, config, options);
  const loop::PlanAdvice advice{
      .weights = options.precision.fp8() ? "fewer --layers" : "fewer --layers, --flow fp8_lora",
      .reference = {},
      .lengths = "a lower --max-num-seqs, --prompt-tokens, --new-tokens or --batch-tokens",
      .pages = options.fp8_kv ? "" : "--kv-cache-dtype fp8",
      .limit = kMoreMemory};
  loop::check_plan(plan, memory_limit(arguments.device), advice);
  const bool rollout = arguments.what == "rollout";
  const bool json_alone = rollout && arguments.json;
  const auto say = [&](const std::string& line) {
    if (!json_alone) print_line(line);
  };
  say(fmt::format(
      "{}: {}, layers {}, flow {} {}, KV {}, LoRA {}; {} prompts x {} samples, "
      "{} + {} tokens",
      backend->name(), arguments.shape, config.num_hidden_layers, arguments.flow, arguments.scales,
      arguments.kv_cache_dtype, arguments.lora_rank, arguments.num_prompts, arguments.num_samples,
      arguments.prompt_tokens, arguments.new_tokens));
  const bench::DeviceLimits device = rollout ? limits_of(arguments) : bench::DeviceLimits{};
  loop::prepare_backend(*backend, config, config.vocab_size, options);
  const double before_start = now_seconds();
  loop::Policy policy(backend->allocator(), config, config.vocab_size, options);
  fill_random_weights(*backend, policy.model());
  const double start_seconds = now_seconds() - before_start;

  std::vector<rollout::PromptRequest> requests;
  for (std::vector<int32_t>& ids :
       random_prompts(arguments.num_prompts, arguments.prompt_tokens, config.vocab_size)) {
    requests.push_back({.ids = std::move(ids),
                        .num_samples = arguments.num_samples,
                        .key = {.seed = 3, .prompt = static_cast<uint32_t>(requests.size())}});
  }
  rollout::SamplingOptions sampling;
  sampling.max_new_tokens = arguments.new_tokens;
  sampling.ignore_eos = true;
  rollout::Engine engine(*backend, policy.decoder(), policy.head(), policy.pages(), nullptr,
                         {.max_num_seqs = options.max_sequences});
  // A short call first: the device wakes up and the workspaces grow.
  rollout::SamplingOptions few = sampling;
  few.max_new_tokens = std::min<int64_t>(4, sampling.max_new_tokens);
  engine.run(requests, few);
  const rollout::EngineStats warm = engine.stats();

  // Decoding alone: from the step after the last one that computed prompt tokens.
  const int64_t prompt_tokens = arguments.num_prompts * arguments.prompt_tokens;
  const double begin = now_seconds();
  double decode_begin = 0;
  int64_t decode_first = 0;
  const auto completions = engine.run(requests, sampling, [&](int64_t, int64_t num_tokens) {
    const int64_t computed = engine.stats().num_prompt_tokens - warm.num_prompt_tokens;
    if (decode_begin == 0 && computed >= prompt_tokens) {
      decode_begin = now_seconds();
      decode_first = num_tokens;
    }
  });
  const double end = now_seconds();
  const rollout::EngineStats measured = engine.stats();
  const auto tokens =
      static_cast<double>(arguments.num_prompts * arguments.num_samples * arguments.new_tokens);
  const int64_t steps = measured.num_steps - warm.num_steps;
  say(
      fmt::format("  start {:.1f} s; call {:.2f} s, {:.0f} output tok/s; decoding alone {:.0f} "
                  "tok/s; {} steps, "
                  "{:.2f} ms each; {} preemptions",
                  start_seconds, end - begin, tokens / (end - begin),
                  (tokens - static_cast<double>(decode_first)) / (end - decode_begin), steps,
                  1e3 * (end - begin) / static_cast<double>(steps),
                  measured.num_preemptions - warm.num_preemptions));
  if (arguments.device.inexact_products) print_line("  products are not exact");
  const auto again = [&] { return same_bits(engine.run(requests, sampling), completions); };
  const MemoryVerdict memory = check_memory(
      *backend, policy, plan, {.repeat = arguments.repeat, .remap = arguments.remap}, again);
  say(memory.text);
  if (rollout) {
    const RolloutTimes times{.start_seconds = start_seconds,
                             .call_seconds = end - begin,
                             .decode_seconds = end - decode_begin,
                             .decode_tokens = static_cast<int64_t>(tokens) - decode_first,
                             .steps = steps,
                             .preemptions = measured.num_preemptions - warm.num_preemptions,
                             .peak_bytes = backend->allocator().peak_bytes()};
    report_limits(arguments, options, policy.model(), device, times, backend->name());
    return memory.good ? 0 : 1;
  }
  double largest = 0;
  const int64_t differing = count_differing(*backend, policy, requests, completions, largest);
  print_line(fmt::format("  {} of {:.0f} log-probabilities differ between rollout and scoring{}",
                         differing, tokens,
                         differing > 0 ? fmt::format(", by up to {:.3g}", largest) : ""));
  return differing == 0 && memory.good ? 0 : 1;
}

}  // namespace octet::app
