// Built-in tasks: problems with verifiable answers that need no file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet::loop {

struct Problem {
  std::string prompt;  // "47+08="
  std::string answer;  // "055"
};

// Sums of two numbers of `digits` digits, zeros in front included. All problems, in an order that
// `seed` decides; the first `eval_size` are held out.
class ArithmeticTask {
 public:
  // Error where digits is not in 1 … 3 or nothing would be left to train on.
  ArithmeticTask(int64_t digits, int64_t eval_size, int64_t seed);

  const std::vector<Problem>& train() const { return train_; }
  const std::vector<Problem>& eval() const { return eval_; }

  // A demonstration's answer: with probability `wrong_share` it is off by one or by ten. The draw
  // is a function of (seed, step, index).
  static std::string demonstrate(const Problem& problem, double wrong_share, int64_t seed,
                                 int64_t step, int64_t index);

  // tokenizer.json and tokenizer_config.json of the task's characters.
  static std::string tokenizer_json();
  static std::string tokenizer_config_json();
  static constexpr int32_t kEosId = 12;

 private:
  std::vector<Problem> train_, eval_;
};

}  // namespace octet::loop
