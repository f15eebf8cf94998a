#include "reward/external_command.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "reward/child_process.h"

namespace octet::reward {
namespace {

std::string request_line(const RewardBatch& batch) {
  Json request;
  request["prompts"] = batch.prompts;
  request["completions"] = batch.completions;
  request["completion_ids"] = batch.completion_ids;
  for (size_t i = 0; i < batch.columns.size(); ++i) {
    if (!batch.columns[i].is_object()) continue;
    for (const auto& [key, value] : batch.columns[i].items()) {
      if (key == "prompts" || key == "completions" || key == "completion_ids") continue;
      Json& column = request[key];
      if (column.is_null()) column = Json::array_t(batch.columns.size());  // nulls
      column[i] = value;
    }
  }
  // A completion may end inside a character; such bytes become U+FFFD.
  return request.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// NaN, Infinity and -Infinity, which Python writes though JSON has none of them, as strings: then
// only their samples are at fault, not the line.
std::string quote_non_finite(std::string_view line) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < line.size();) {
    if (!in_string) {
      size_t length = 0;
      for (const std::string_view name : {"NaN", "Infinity", "-Infinity"}) {
        if (line.substr(i).starts_with(name)) length = name.size();
      }
      if (length > 0) {
        result += "\"NaN or Infinity\"";
        i += length;
        continue;
      }
    }
    const bool escaped = in_string && line[i] == '\\';
    if (line[i] == '"') in_string = !in_string;
    result += line.substr(i, escaped ? 2 : 1);
    i += escaped ? 2 : 1;
  }
  return result;
}

// How an answer that cannot be used begins, for the message.
std::string excerpt(std::string_view answer) {
  return fmt::format("\"{}\"{}", answer.substr(0, 80), answer.size() > 80 ? "…" : "");
}

}  // namespace

struct ExternalCommand::State {
  ExternalCommandOptions options;
  ChildProcess process;
  RewardFailures failures;
  bool started_before = false;
  int restarts_in_a_row = 0;

  std::vector<float> give_up(size_t num_samples, int64_t RewardFailures::*counter,
                             std::string reason) {
    ++(failures.*counter);
    failures.num_failed_samples += static_cast<int64_t>(num_samples);
    failures.last_reason = std::move(reason);
    return std::vector<float>(num_samples, kNoReward);
  }

  // Makes sure that a program waits for a line; returns "" or why there is none.
  std::string ensure_running() {
    if (process.ready()) return "";
    process.stop();
    if (started_before && restarts_in_a_row >= options.max_restarts) {
      failures.given_up = true;
      return fmt::format("given up after {} restarts without a good answer", restarts_in_a_row);
    }
    if (started_before) ++restarts_in_a_row;
    started_before = true;
    return process.start(options.command);
  }

  // Reads the answer into `rewards`; returns "" or what is wrong with the whole of it.
  std::string read_answer(const std::string& line, std::vector<float>& rewards) {
    Json answer;
    try {
      answer = parse_json(quote_non_finite(line), "answer");
    } catch (const Error& error) {
      return fmt::format("the answer is no JSON: {}", excerpt(line));
    }
    if (!answer.is_object() || !answer.contains("rewards") || !answer.at("rewards").is_array()) {
      return fmt::format("the answer must be {{\"rewards\":[…]}}, but is {}", excerpt(line));
    }
    const Json& values = answer.at("rewards");
    if (values.size() != rewards.size()) {
      return fmt::format("{} rewards are required, but {} came", rewards.size(), values.size());
    }
    for (size_t i = 0; i < rewards.size(); ++i) {
      if (values[i].is_null()) continue;
      const float value =
          values[i].is_number() ? static_cast<float>(values[i].get<double>()) : kNoReward;
      if (std::isfinite(value)) {
        rewards[i] = value;
      } else {
        ++failures.num_bad_values;
        ++failures.num_failed_samples;
        failures.last_reason = fmt::format("the reward of sample {} is no finite number: {}", i,
                                           values[i].dump().substr(0, 80));
      }
    }
    return "";
  }
};

ExternalCommand::ExternalCommand(ExternalCommandOptions options)
    : state_(std::make_unique<State>()) {
  if (trim(options.command).empty()) fail_usage("reward.command", "a command is required");
  if (options.command.find('\0') != std::string::npos) {
    fail_usage("reward.command", "the command must not contain a zero byte");
  }
  if (options.timeout.count() <= 0) fail_usage("reward.timeout", "a time above 0 is required");
  state_->options = std::move(options);
}

ExternalCommand::~ExternalCommand() = default;

RewardFailures ExternalCommand::failures() const { return state_->failures; }

std::vector<float> ExternalCommand::score(const RewardBatch& batch) {
  State& s = *state_;
  const size_t num_samples = batch.size();
  if (num_samples == 0) return {};
  if (std::string reason = s.ensure_running(); !reason.empty()) {
    return s.give_up(num_samples, &RewardFailures::num_crashes, std::move(reason));
  }
  std::string line;
  const Deadline deadline = std::chrono::steady_clock::now() + s.options.timeout;
  switch (s.process.exchange(request_line(batch), deadline, &line)) {
    case ExchangeStatus::kAnswered:
      break;
    case ExchangeStatus::kTimedOut:
      s.process.stop();
      return s.give_up(num_samples, &RewardFailures::num_timeouts,
                       fmt::format("no answer within {} ms", s.options.timeout.count()));
    case ExchangeStatus::kEnded:
      return s.give_up(num_samples, &RewardFailures::num_crashes,
                       fmt::format("the program ended before it answered ({})", s.process.stop()));
    case ExchangeStatus::kTooLong:
      s.process.stop();
      return s.give_up(num_samples, &RewardFailures::num_bad_answers, "the answer is too long");
  }
  std::vector<float> rewards(num_samples, kNoReward);
  if (std::string reason = s.read_answer(line, rewards); !reason.empty()) {
    s.process.stop();
    return s.give_up(num_samples, &RewardFailures::num_bad_answers, std::move(reason));
  }
  s.restarts_in_a_row = 0;
  return rewards;
}

}  // namespace octet::reward
