// Rewards: functions from a batch of samples to one number each.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace octet::reward {

constexpr float kNoReward = std::numeric_limits<float>::quiet_NaN();

// A batch of N samples; everything is borrowed.
struct RewardBatch {
  std::span<const std::string> prompts;                  // [N] text as given to the model
  std::span<const std::string> completions;              // [N] text without special tokens
  std::span<const std::vector<int32_t>> completion_ids;  // [N]
  // [N] one object per sample: the data's other columns (`answer`, `solution`, …); empty: none.
  std::span<const Json> columns;

  size_t size() const { return completions.size(); }
};

// What went wrong so far, and how often.
struct RewardFailures {
  int64_t num_timeouts = 0;        // batches without an answer in time
  int64_t num_crashes = 0;         // batches in which the process ended or could not be started
  int64_t num_bad_answers = 0;     // batches answered with no JSON or the wrong shape or count
  int64_t num_bad_values = 0;      // samples whose value was no finite number (null is no failure)
  int64_t num_failed_samples = 0;  // samples left without a reward by any of the above
  std::string last_reason;
  bool given_up = false;  // no further sample gets a reward
};

class Reward {
 public:
  virtual ~Reward() = default;
  virtual std::string name() const = 0;
  // One reward per sample; NaN: none. Throws where the batch itself is at fault (a column that the
  // reward needs is missing), never for what a completion says.
  virtual std::vector<float> score(const RewardBatch& batch) = 0;
  virtual RewardFailures failures() const { return {}; }
};

// The built-in `name` with its options (an object or null; an unknown key is an error). Throws
// UsageError naming the nearest for an unknown name.
//
// Those that compare read the reference from the column `answer_field` (default "answer"; "a.b"
// looks inside an object), as text or number. Of "… #### 18" they take what follows the last
// "####". Numbers are compared exactly, without floating point: 1,000 = $1000.00, 18.0 = 18., 1/2 =
// 0.5.
//   gsm8k        1 where the number after "#### " (the last in the last 300 bytes) is the answer's,
//                else 0
//   boxed        1 where the last balanced \boxed{…} equals the answer (or the answer's own
//                \boxed{…}) after normalisation of LaTeX, or as a number
//   numeric      1 where the last number of the completion is the answer
//   exact_match  1 where the completion, without outer blanks, is the answer
//   format       1 where the completion is <think>…</think> and then anything (TRL's
//                think_format_reward)
//   regex        1 where `pattern` (PCRE2; the dot takes newlines, ^ and $ stand at lines) is found
//   length       the soft overlong penalty min(−(len − (max_length − cache))/cache, 0), len in
//                tokens; options max_length, cache
std::unique_ptr<Reward> make_reward(std::string_view name, const Json& options);
std::vector<std::string> reward_names();

// Σ weight_f · reward_f over the functions that gave a reward (TRL's nansum); NaN where none did.
// `rewards` is [functions][N]; empty `weights`: all 1. Throws where lengths differ.
std::vector<float> combine_rewards(std::span<const std::vector<float>> rewards,
                                   std::span<const double> weights);

}  // namespace octet::reward
