#include "app/rollout_limits.h"

#include <algorithm>

#include <fmt/format.h>

#include "app/output.h"

namespace octet::app {
namespace {

double bytes_of(const ops::Weight& weight) {
  const int64_t bytes = weight.is_quantized() ? weight.quantized.codes.num_bytes() +
                                                    weight.quantized.scales.num_bytes()
                                              : weight.dense.num_bytes();
  return static_cast<double>(bytes);
}

double flops_of(const ops::Weight& weight) {
  return 2.0 * static_cast<double>(weight.rows() * weight.columns());
}

}  // namespace

RolloutLimits::RolloutLimits(const model::Model& model, const RolloutWork& work,
                             const bench::DeviceLimits& device)
    : work_(work), device_(device), fp8_(model.precision().fp8()) {
  for (const model::LinearLayer* linear : model.linear_layers()) {
    const ops::Weight weight = linear->weight->forward_weight();
    linear_bytes_ += bytes_of(weight);
    linear_flops_ += flops_of(weight);
    if (linear->lora.empty()) continue;
    for (const model::Parameter* factor : {linear->lora.a, linear->lora.b}) {
      linear_bytes_ += bytes_of(factor->forward_weight());
      adapter_flops_ += flops_of(factor->forward_weight());
    }
  }
  const ops::Weight head = model.head().forward_weight();
  head_bytes_ = bytes_of(head);
  head_flops_ = flops_of(head);
  const io::ModelConfig& config = model.config();
  const auto layers = static_cast<double>(config.num_hidden_layers);
  const int64_t head_bytes = work.fp8_kv ? config.head_dim + 4 : 2 * config.head_dim;
  kv_bytes_ = 2 * layers * static_cast<double>(config.num_key_value_heads * head_bytes);
  pair_flops_ = 4 * layers * static_cast<double>(config.num_attention_heads * config.head_dim);
}

double RolloutLimits::step_seconds(double tokens, double sampled, double kv_tokens,
                                   double pairs) const {
  const double linear_peak = fp8_ ? device_.fp8_flops : device_.bf16_flops;
  const double bandwidth = device_.copy_bandwidth, peak = device_.bf16_flops;
  return std::max(linear_bytes_ / bandwidth,
                  tokens * (linear_flops_ / linear_peak + adapter_flops_ / peak)) +
         (sampled > 0 ? std::max(head_bytes_ / bandwidth, sampled * head_flops_ / peak) : 0) +
         std::max(kv_tokens * kv_bytes_ / bandwidth, pairs * pair_flops_ / peak);
}

double RolloutLimits::prefill_seconds() const {
  const auto prompts = static_cast<double>(work_.prompts);
  const auto length = static_cast<double>(work_.prompt_tokens);
  const int64_t tokens = work_.prompts * work_.prompt_tokens;
  const auto steps = static_cast<double>((tokens + work_.batch_tokens - 1) / work_.batch_tokens);
  // Keys and values are written once and read once; a query at position p sees p + 1 keys.
  return steps * step_seconds(prompts * length / steps, prompts / steps,
                              2 * prompts * length / steps,
                              prompts * length * (length + 1) / 2 / steps);
}

double RolloutLimits::decode_seconds(int64_t num_tokens) const {
  const int64_t sequences = work_.prompts * work_.samples;
  const int64_t most = (work_.new_tokens - 1) * sequences;
  const int64_t steps = (std::min(num_tokens, most) + sequences - 1) / sequences;
  double total = 0;
  for (int64_t first = 0; first < sequences; first += work_.max_sequences) {
    const auto running = static_cast<double>(std::min(work_.max_sequences, sequences - first));
    const double prompts = std::max(1.0, running / static_cast<double>(work_.samples));
    for (int64_t step = work_.new_tokens - steps; step < work_.new_tokens; ++step) {
      const auto prompt = static_cast<double>(work_.prompt_tokens);
      const auto own = static_cast<double>(step);
      total += step_seconds(running, running, prompts * prompt + running * own,
                            running * (prompt + own));
    }
  }
  return total;
}

double RolloutLimits::seconds() const {
  return prefill_seconds() + decode_seconds(work_.prompts * work_.samples * (work_.new_tokens - 1));
}

namespace {

// Measured and least seconds of the call and its two parts. What is left of the call before
// decoding alone is prefill, with the decoding beside it, whose limit is added to prefill's.
struct Shares {
  double prefill_seconds, prefill_limit, decode_limit, limit;
};

Shares shares_of(const RolloutLimits& limits, const RolloutTimes& times) {
  const double whole = limits.seconds(), decode = limits.decode_seconds(times.decode_tokens);
  return {times.call_seconds - times.decode_seconds, whole - decode, decode, whole};
}

}  // namespace

std::string describe(const RolloutLimits& limits, const RolloutTimes& times) {
  const Shares s = shares_of(limits, times);
  return fmt::format(
      "  of the limit: call {:.1f}% ({:.2f} s), prefill {:.1f}% ({:.2f} of {:.2f} s), decoding "
      "alone {:.1f}% ({:.2f} of {:.2f} s); copy {:.0f} GB/s, BF16 {:.3g}, FP8 {:.3g} TFLOP/s",
      100 * s.limit / times.call_seconds, s.limit, 100 * s.prefill_limit / s.prefill_seconds,
      s.prefill_limit, s.prefill_seconds, 100 * s.decode_limit / times.decode_seconds,
      s.decode_limit, times.decode_seconds, 1e-9 * limits.device().copy_bandwidth,
      1e-12 * limits.device().bf16_flops, 1e-12 * limits.device().fp8_flops);
}

std::string json(const RolloutLimits& limits, const RolloutTimes& times,
                 const BenchArguments& arguments, const std::string& backend) {
  const Shares s = shares_of(limits, times);
  const RolloutWork& work = limits.work();
  const auto tokens = static_cast<double>(work.prompts * work.samples * work.new_tokens);
  return fmt::format(
      "{{\"bench\":\"rollout\",\"backend\":{},\"shape\":{},\"layers\":{},\"flow\":{},"
      "\"load_in_fp8\":{},\"kv_cache_dtype\":{},\"lora_rank\":{},\"prompts\":{},\"samples\":{},"
      "\"prompt_tokens\":{},\"new_tokens\":{},\"max_num_seqs\":{},\"start_seconds\":{},"
      "\"seconds\":{},\"tokens_per_second\":{},\"decode_seconds\":{},\"decode_tokens\":{},"
      "\"decode_tokens_per_second\":{},\"prefill_seconds\":{},\"steps\":{},\"preemptions\":{},"
      "\"peak_bytes\":{},\"limit_seconds\":{},\"prefill_limit_seconds\":{},"
      "\"decode_limit_seconds\":{},\"share_of_limit\":{},\"prefill_share_of_limit\":{},"
      "\"decode_share_of_limit\":{},\"copy_bandwidth\":{},\"bf16_flops\":{},\"fp8_flops\":{}}}",
      json_string(backend), json_string(arguments.shape), arguments.num_layers,
      json_string(arguments.flow), json_string(arguments.scales),
      json_string(arguments.kv_cache_dtype), arguments.lora_rank, work.prompts, work.samples,
      work.prompt_tokens, work.new_tokens, work.max_sequences, times.start_seconds,
      times.call_seconds, tokens / times.call_seconds, times.decode_seconds, times.decode_tokens,
      static_cast<double>(times.decode_tokens) / times.decode_seconds, s.prefill_seconds,
      times.steps, times.preemptions, times.peak_bytes, s.limit, s.prefill_limit, s.decode_limit,
      s.limit / times.call_seconds, s.prefill_limit / s.prefill_seconds,
      s.decode_limit / times.decode_seconds, limits.device().copy_bandwidth,
      limits.device().bf16_flops, limits.device().fp8_flops);
}

}  // namespace octet::app
