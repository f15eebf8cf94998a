#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "app/commands.h"
#include "app/model_session.h"
#include "app/output.h"
#include "app/score_gradients.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "model/scoring.h"

namespace octet::app {
namespace {

std::string json_answer(const Prompt& prompt, const model::TokenScores& scores, int64_t num_top) {
  std::string log_probs = json_numbers(scores.log_probs);
  log_probs.insert(1, scores.log_probs.empty() ? "null" : "null,");
  std::string top;
  for (size_t i = 0; i < scores.top.size(); ++i) {
    const bool first = i % static_cast<size_t>(num_top) == 0;
    top += fmt::format("{}[{},{}]", first ? (i == 0 ? "[" : "],[") : ",", scores.top[i].id,
                       scores.top[i].logit);
  }
  if (!top.empty()) top = ",\"top\":[" + top + "]]";
  return fmt::format("{{\"ids\":{},\"logprobs\":{},\"entropies\":{}{}}}", json_ids(prompt.ids),
                     log_probs, json_numbers(scores.entropies), top);
}

std::string token_text(const loop::TextSide& text, int32_t id) {
  const bool named = text.tokenizer && text.tokenizer->contains(id);
  return named ? json_string(text.tokenizer->id_to_bytes(id)) : "";
}

std::string table(const Prompt& prompt, const model::TokenScores& scores,
                  const loop::TextSide& text, int64_t num_top) {
  std::string rows = fmt::format("{}\n{:>9}{:>9}{:>12}{:>12}  token\n", prompt.where, "position",
                                 "id", "log-prob", "entropy");
  double sum = 0;
  for (size_t t = 0; t < prompt.ids.size(); ++t) {
    const int32_t id = prompt.ids[t];
    rows += fmt::format("{:>9}{:>9}{:>12}{:>12.4f}  {}\n", t, id,
                        t == 0 ? "" : fmt::format("{:.4f}", scores.log_probs[t - 1]),
                        scores.entropies[t], token_text(text, id));
    for (int64_t i = 0; i < num_top; ++i) {
      const model::TopToken& next = scores.top[t * static_cast<size_t>(num_top) + i];
      rows += fmt::format("{:>18}{:>24.4f}  {}\n", next.id, next.logit, token_text(text, next.id));
    }
    if (t > 0) sum += scores.log_probs[t - 1];
  }
  if (prompt.ids.size() < 2) return rows;
  const double mean = sum / static_cast<double>(prompt.ids.size() - 1);
  return rows + fmt::format("mean log-prob {:.4f}, perplexity {:.4f}\n", mean, std::exp(-mean));
}

}  // namespace

int run_score(const ScoreArguments& arguments) {
  check_temperature(arguments.temperature);
  if (arguments.num_top < 0 || arguments.num_top > 1000) {
    fail_usage("--top", "must be 0 to 1000, but is {}", arguments.num_top);
  }
  // `generate` at temperature 0 is greedy and gives the log-probabilities of temperature 1.
  const float temperature =
      arguments.temperature == 0 ? 1.0f : static_cast<float>(arguments.temperature);
  ModelSession session(arguments.model);
  const std::vector<Prompt> prompts =
      session.read_prompts(arguments.input, !arguments.no_special_tokens, false);
  if (arguments.num_top > session.text().num_known(session.config())) {
    fail_usage("--top", "{} are asked for, but the model knows only {} ids", arguments.num_top,
               session.text().num_known(session.config()));
  }
  std::vector<SequenceLength> lengths;
  for (const Prompt& prompt : prompts) {
    const auto length = static_cast<int64_t>(prompt.ids.size());
    if (length > 0) lengths.push_back({length, length});
  }
  const bool any = !lengths.empty();
  if (any) session.load(std::move(lengths), 1, !arguments.gradients.empty());

  int exit_code = 0;
  observe::Progress progress = progress_bar("score", static_cast<int64_t>(prompts.size()), "line");
  const size_t batch_size = any ? static_cast<size_t>(session.batch_size()) : prompts.size();
  for (size_t begin = 0; begin < prompts.size(); begin += batch_size) {
    throw_if_interrupted();
    const size_t end = std::min(prompts.size(), begin + batch_size);
    std::vector<model::ScoringRequest> requests;  // a line that cannot be served is an empty one
    for (size_t i = begin; i < end; ++i) requests.push_back({prompts[i].ids, 1, true});
    std::vector<model::TokenScores> scores;
    if (any) {
      scores = model::score_sequences(session.backend(), session.policy().decoder(),
                                      session.policy().head(), session.policy().pages(), requests,
                                      temperature, {}, 0, arguments.num_top);
    }
    for (size_t i = begin; i < end; ++i) {
      const Prompt& prompt = prompts[i];
      if (!prompt.error.empty()) {
        exit_code = 1;
        print_line(report_line_error(prompt.error, arguments.input.json));
      } else {
        print_line(arguments.input.json
                       ? json_answer(prompt, scores[i - begin], arguments.num_top)
                       : table(prompt, scores[i - begin], session.text(), arguments.num_top));
      }
    }
    progress.update(static_cast<int64_t>(end));
  }
  if (!arguments.gradients.empty()) {
    if (!any) fail("--gradients", "no line of the input could be served");
    write_gradients(session, prompts, temperature, arguments.gradients);
  }
  return exit_code;
}

}  // namespace octet::app
