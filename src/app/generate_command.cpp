#include <algorithm>

#include <fmt/format.h>

#include "app/commands.h"
#include "app/model_session.h"
#include "app/output.h"
#include "base/error.h"
#include "rollout/engine.h"

namespace octet::app {
namespace {

using rollout::Completion;

void check_arguments(const GenerateArguments& arguments) {
  const auto require = [](bool holds, const char* flag, const char* what, double given) {
    if (!holds) fail_usage(flag, "must be {}, but is {}", what, given);
  };
  check_temperature(arguments.temperature);
  require(arguments.top_p > 0 && arguments.top_p <= 1, "--top-p", "above 0 and at most 1",
          arguments.top_p);
  require(arguments.min_p >= 0 && arguments.min_p <= 1, "--min-p", "0 to 1", arguments.min_p);
  require(arguments.top_k >= 0, "--top-k", "0 or more", arguments.top_k);
  require(arguments.max_new_tokens >= 1, "--max-new-tokens", "1 or more",
          static_cast<double>(arguments.max_new_tokens));
  require(arguments.num_samples >= 1 && arguments.num_samples <= 65536, "--n", "1 to 65536",
          static_cast<double>(arguments.num_samples));
  if (std::ranges::count(arguments.stop, "") > 0) {
    fail_usage("--stop", "must be a text, but is empty; leave it out to stop at end tokens alone");
  }
}

std::string text_of(const Completion& completion, const loop::TextSide& text) {
  return text.completion_text(completion.ids, completion.stop_string);
}

std::string json_completion(const Completion& completion, const loop::TextSide& text) {
  const bool stopped = completion.finish_reason == rollout::FinishReason::kStop;
  return fmt::format("{{\"ids\":{},\"text\":{},\"logprobs\":{},\"finish_reason\":\"{}\"}}",
                     json_ids(completion.ids), json_string(text_of(completion, text)),
                     json_numbers(completion.log_probs), stopped ? "stop" : "length");
}

// Prints the answers in the order of the lines, each as soon as all before it are there.
class OrderedAnswers {
 public:
  OrderedAnswers(const std::vector<Prompt>& prompts, const GenerateArguments& arguments,
                 const loop::TextSide& text)
      : prompts_(prompts), arguments_(arguments), text_(text), completions_(prompts.size()) {}

  void add(size_t line, const Completion& completion) {
    completions_[line].push_back(completion);
    print_ready();
  }
  void print_ready() {
    for (; next_ < prompts_.size(); ++next_) {
      std::vector<Completion>& samples = completions_[next_];
      if (!prompts_[next_].error.empty()) {
        print_line(report_line_error(prompts_[next_].error, arguments_.input.json));
        continue;
      }
      if (static_cast<int64_t>(samples.size()) < arguments_.num_samples) return;
      std::ranges::sort(samples, {}, &Completion::sample);
      print_line(arguments_.input.json ? json_line(samples) : plain(samples));
      samples = {};
    }
  }

 private:
  std::string json_line(const std::vector<Completion>& samples) const {
    if (samples.size() == 1) return json_completion(samples[0], text_);
    std::vector<std::string> list;
    for (const Completion& sample : samples) list.push_back(json_completion(sample, text_));
    return fmt::format("{{\"completions\":[{}]}}", fmt::join(list, ","));
  }
  std::string plain(const std::vector<Completion>& samples) const {
    std::string result;
    for (const Completion& sample : samples) {
      if (prompts_.size() > 1 || samples.size() > 1) {
        result += fmt::format("{}# {}, sample {}\n", result.empty() ? "" : "\n",
                              prompts_[next_].where, sample.sample + 1);
      }
      result +=
          text_.tokenizer ? text_of(sample, text_) : fmt::format("{}", fmt::join(sample.ids, " "));
    }
    return result;
  }

  const std::vector<Prompt>& prompts_;
  const GenerateArguments& arguments_;
  const loop::TextSide& text_;
  std::vector<std::vector<Completion>> completions_;  // by line, in the order of ending
  size_t next_ = 0;
};

}  // namespace

int run_generate(const GenerateArguments& arguments) {
  check_arguments(arguments);
  ModelSession session(arguments.model);
  std::vector<Prompt> prompts =
      session.read_prompts(arguments.input, !arguments.no_special_tokens, true);

  // The line's number is part of its random key: a line that fails changes no other.
  std::vector<rollout::PromptRequest> requests;
  std::vector<size_t> lines;  // of the requests
  std::vector<SequenceLength> lengths;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Prompt& prompt = prompts[i];
    const auto length = static_cast<int64_t>(prompt.ids.size());
    if (prompt.error.empty() && length >= session.max_positions()) {
      prompt.error = fmt::format(
          "[{}] a prompt must leave room for a new token within {} positions, but has {} tokens",
          prompt.where, session.max_positions(), length);
    }
    if (!prompt.error.empty()) continue;
    const int64_t most = std::min(session.max_positions() - length, arguments.max_new_tokens);
    lengths.push_back({length + most, length});
    lines.push_back(i);
    requests.push_back({.ids = prompt.ids,
                        .num_samples = arguments.num_samples,
                        .key = {.seed = arguments.seed, .prompt = static_cast<uint32_t>(i)}});
  }

  OrderedAnswers answers(prompts, arguments, session.text());
  answers.print_ready();
  if (!requests.empty()) {
    session.load(std::move(lengths), arguments.num_samples, false);
    loop::Policy& policy = session.policy();
    rollout::Engine engine(session.backend(), policy.decoder(), policy.head(), policy.pages(),
                           session.text().tokenizer ? &*session.text().tokenizer : nullptr,
                           {.max_num_seqs = session.batch_size()});
    const rollout::SamplingOptions sampling{
        .temperature = static_cast<float>(arguments.temperature),
        .top_p = static_cast<float>(arguments.top_p),
        .min_p = static_cast<float>(arguments.min_p),
        .top_k = arguments.top_k,
        .max_new_tokens = arguments.max_new_tokens,
        .stop_ids = session.text().stop_ids,
        .stop = arguments.stop,
        .ignore_eos = arguments.ignore_eos};
    observe::Progress progress = progress_bar(
        "generate", static_cast<int64_t>(requests.size()) * arguments.num_samples, "completion");
    engine.run(
        requests, sampling,
        [&](int64_t num_finished, int64_t num_tokens) {
          progress.update(num_finished, fmt::format("{} tokens", num_tokens));
        },
        [&](const Completion& completion) {
          answers.add(lines[static_cast<size_t>(completion.prompt)], completion);
        });
  }
  return requests.size() == prompts.size() ? 0 : 1;
}

}  // namespace octet::app
