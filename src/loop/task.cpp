#include "loop/task.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "base/error.h"
#include "base/rng.h"
#include "text/tokenizer.h"

namespace octet::loop {
namespace {
constexpr std::string_view kCharacters = "0123456789+=";
const std::string kEndToken = "<|endoftext|>";
}  // namespace

ArithmeticTask::ArithmeticTask(int64_t digits, int64_t eval_size, int64_t seed) {
  if (digits < 1 || digits > 3) {
    fail_usage("data.task_digits", "must lie in [1, 3], but is {}", digits);
  }
  int64_t numbers = 1;
  for (int64_t i = 0; i < digits; ++i) numbers *= 10;
  const int64_t count = numbers * numbers;
  if (eval_size < 0 || eval_size >= count) {
    fail_usage("data.task_eval_size", "must lie in [0, {}), the number of problems, but is {}",
               count, eval_size);
  }
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  RandomSequence random({.seed = static_cast<uint64_t>(seed)}, RngUse::kTask);
  for (int64_t i = count - 1; i > 0; --i) {
    std::swap(order[i], order[random.next_below(static_cast<uint32_t>(i + 1))]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t a = order[i] / numbers;
    const int64_t b = order[i] % numbers;
    (i < eval_size ? eval_ : train_)
        .push_back({fmt::format("{0:0{2}}+{1:0{2}}=", a, b, digits),
                    fmt::format("{0:0{1}}", a + b, digits + 1)});
  }
}

std::string ArithmeticTask::demonstrate(const Problem& problem, double wrong_share, int64_t seed,
                                        int64_t step, int64_t index) {
  RandomSequence random({.seed = static_cast<uint64_t>(seed),
                         .step = static_cast<uint32_t>(step),
                         .prompt = static_cast<uint32_t>(index)},
                        RngUse::kTask);
  if (random.next_unit() >= wrong_share) return problem.answer;
  constexpr int64_t kOffsets[] = {-10, -1, 1, 10};
  int64_t limit = 2;  // above the largest sum, 2 (10^digits − 1)
  for (size_t i = 1; i < problem.answer.size(); ++i) limit *= 10;
  const int64_t answer = std::stoll(problem.answer);
  const int64_t offset = kOffsets[random.next_below(4)];
  const bool in_range = answer + offset >= 0 && answer + offset < limit;
  return fmt::format("{0:0{1}}", in_range ? answer + offset : answer - offset,
                     problem.answer.size());
}

std::string ArithmeticTask::tokenizer_json() {
  return text::make_character_tokenizer(kCharacters, std::vector<std::string>{kEndToken});
}

std::string ArithmeticTask::tokenizer_config_json() {
  return fmt::format(
      "{{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"eos_token\": \"{0}\", \"pad_token\": "
      "\"{0}\"}}\n",
      kEndToken);
}

}  // namespace octet::loop
