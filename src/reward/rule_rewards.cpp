#include "reward/rule_rewards.h"

#include <algorithm>
#include <optional>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <pcre2.h>

#include "base/error.h"
#include "base/strings.h"
#include "reward/latex.h"
#include "reward/number.h"

namespace octet::reward {
namespace {

// ---- Rewards that compare with a reference answer ----

// The value at `field`, a key or a path "a.b"; null where there is none.
const Json* find_column(const Json& columns, const std::string& field) {
  if (columns.is_object() && columns.contains(field)) return &columns.at(field);
  const Json* value = &columns;
  for (const std::string& key : split(field, '.')) {
    if (!value->is_object() || !value->contains(key)) return nullptr;
    value = &value->at(key);
  }
  return value;
}

// "… #### 18" → "18"; other texts without outer blanks.
std::string_view after_hashes(std::string_view text) {
  const size_t at = text.rfind("####");
  return trim(at == std::string_view::npos ? text : text.substr(at + 4));
}

class AnswerReward : public Reward {
 public:
  AnswerReward(std::string name, Options& options)
      : name_(std::move(name)), answer_field_(options.text("answer_field", "answer")) {}

  std::string name() const override { return name_; }
  RewardFailures failures() const override { return failures_; }

  std::vector<float> score(const RewardBatch& batch) override {
    if (batch.columns.size() != batch.size()) {
      fail("reward " + name_, "the data's columns are needed for each of {} samples, but {} came",
           batch.size(), batch.columns.size());
    }
    std::vector<float> rewards;
    for (size_t i = 0; i < batch.size(); ++i) {
      const std::optional<std::string> wanted = answer(batch.columns[i]);
      const std::optional<bool> correct =
          wanted ? matches(batch.completions[i], *wanted) : unusable("null");
      rewards.push_back(!correct ? kNoReward : *correct ? 1.0f : 0.0f);
    }
    return rewards;
  }

 protected:
  // Whether the completion has the answer; nothing where the answer cannot be used.
  virtual std::optional<bool> matches(const std::string& completion, const std::string& answer) = 0;

  std::optional<bool> unusable(const std::string& answer) {
    ++failures_.num_bad_values;
    ++failures_.num_failed_samples;
    failures_.last_reason =
        fmt::format("the answer \"{}\" cannot be compared with", answer.substr(0, 80));
    return std::nullopt;
  }

 private:
  // Nothing where the data has null.
  std::optional<std::string> answer(const Json& columns) const {
    const Json* value = find_column(columns, answer_field_);
    if (value == nullptr) {
      std::vector<std::string> names;
      if (columns.is_object()) {
        for (const auto& [key, unused] : columns.items()) names.push_back(key);
      }
      fail("reward " + name_,
           "the column \"{}\" is needed, but the data has [{}]; set answer_field", answer_field_,
           fmt::join(names, ", "));
    }
    if (value->is_null()) return std::nullopt;
    return value->is_string() ? value->get<std::string>() : value->dump();
  }

  std::string name_;
  std::string answer_field_;
  RewardFailures failures_;
};

class Gsm8kReward final : public AnswerReward {
 public:
  explicit Gsm8kReward(Options& options) : AnswerReward("gsm8k", options) {}

 private:
  static std::optional<Number> marked_number(std::string_view text) {
    constexpr std::string_view kMark = "#### ";
    constexpr size_t kTail = 300;
    if (text.size() > kTail) text.remove_prefix(text.size() - kTail);
    for (size_t at = text.size(); at > 0;) {
      at = text.rfind(kMark, at - 1);
      if (at == std::string_view::npos) break;
      if (auto number = leading_number(text.substr(at + kMark.size()))) return number;
    }
    return std::nullopt;
  }

  std::optional<bool> matches(const std::string& completion, const std::string& answer) override {
    const std::optional<Number> wanted = parse_number(after_hashes(answer));
    if (!wanted) return unusable(answer);
    return marked_number(completion) == wanted;
  }
};

class NumericReward final : public AnswerReward {
 public:
  explicit NumericReward(Options& options) : AnswerReward("numeric", options) {}

 private:
  std::optional<bool> matches(const std::string& completion, const std::string& answer) override {
    const std::optional<Number> wanted = parse_number(after_hashes(answer));
    if (!wanted) return unusable(answer);
    return last_number(completion) == wanted;
  }
};

class BoxedReward final : public AnswerReward {
 public:
  explicit BoxedReward(Options& options) : AnswerReward("boxed", options) {}

 private:
  std::optional<bool> matches(const std::string& completion, const std::string& answer) override {
    const std::optional<std::string> given = last_boxed(completion);
    const std::optional<std::string> wanted = last_boxed(answer);
    return given && same_latex_answer(*given, wanted ? *wanted : after_hashes(answer));
  }
};

class ExactMatchReward final : public AnswerReward {
 public:
  explicit ExactMatchReward(Options& options) : AnswerReward("exact_match", options) {}

 private:
  std::optional<bool> matches(const std::string& completion, const std::string& answer) override {
    return trim(completion) == after_hashes(answer);
  }
};

// ---- Rewards that look at the completion alone ----

class ThinkFormatReward final : public Reward {
 public:
  explicit ThinkFormatReward(Options&) {}
  std::string name() const override { return "format"; }
  std::vector<float> score(const RewardBatch& batch) override {
    std::vector<float> rewards;
    for (const std::string& completion : batch.completions) {
      constexpr std::string_view kOpen = "<think>";
      const bool holds = completion.starts_with(kOpen) &&
                         completion.find(kOpen, kOpen.size()) == std::string::npos &&
                         completion.find("</think>", kOpen.size()) != std::string::npos;
      rewards.push_back(holds ? 1.0f : 0.0f);
    }
    return rewards;
  }
};

class RegexReward final : public Reward {
 public:
  explicit RegexReward(Options& options) {
    const std::string pattern = options.text("pattern", "");
    if (pattern.empty()) fail_usage("reward regex", "the option \"pattern\" is required");
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | PCRE2_DOTALL | PCRE2_MULTILINE,
                              &error, &offset, nullptr));
    if (code_ == nullptr) {
      PCRE2_UCHAR message[256] = {};
      pcre2_get_error_message(error, message, sizeof message);
      fail_usage("reward regex", "\"pattern\" must be a PCRE2 expression, but at character {}: {}",
                 offset, reinterpret_cast<const char*>(message));
    }
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // without it, matching is only slower
    match_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    limits_.reset(pcre2_match_context_create(nullptr));
    stack_.reset(pcre2_jit_stack_create(32 << 10, 8 << 20, nullptr));
    OCTET_ASSERT(match_ != nullptr && limits_ != nullptr && stack_ != nullptr);
    pcre2_jit_stack_assign(limits_.get(), nullptr, stack_.get());
    pcre2_set_match_limit(limits_.get(), 1'000'000);  // a pattern that runs away gives no reward
  }

  std::string name() const override { return "regex"; }
  RewardFailures failures() const override { return failures_; }

  std::vector<float> score(const RewardBatch& batch) override {
    std::vector<float> rewards;
    for (const std::string& completion : batch.completions) {
      const int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(completion.data()),
                                    completion.size(), 0, 0, match_.get(), limits_.get());
      if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
        ++failures_.num_bad_values;
        ++failures_.num_failed_samples;
        failures_.last_reason = fmt::format("the pattern failed on a completion (PCRE2 {})", found);
        rewards.push_back(kNoReward);
      } else {
        rewards.push_back(found >= 0 ? 1.0f : 0.0f);
      }
    }
    return rewards;
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
    void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
    void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> match_;
  std::unique_ptr<pcre2_jit_stack, Free> stack_;
  std::unique_ptr<pcre2_match_context, Free> limits_;
  RewardFailures failures_;
};

// Soft overlong punishment, DAPO (arXiv 2503.14476), eq. 13; its weight makes it stronger.
class LengthReward final : public Reward {
 public:
  explicit LengthReward(Options& options)
      : max_length_(options.number("max_length", 0)), cache_(options.number("cache", 0)) {
    if (!(cache_ > 0 && cache_ <= max_length_)) {
      fail_usage("reward length", "0 < cache ≤ max_length is required, but they are {} and {}",
                 cache_, max_length_);
    }
  }

  std::string name() const override { return "length"; }
  std::vector<float> score(const RewardBatch& batch) override {
    if (batch.completion_ids.size() != batch.size()) {
      fail("reward length", "the ids of each of {} completions are needed, but {} came",
           batch.size(), batch.completion_ids.size());
    }
    std::vector<float> rewards;
    for (const std::vector<int32_t>& ids : batch.completion_ids) {
      const double excess = static_cast<double>(ids.size()) - (max_length_ - cache_);
      rewards.push_back(excess > 0 ? static_cast<float>(-excess / cache_) : 0.0f);
    }
    return rewards;
  }

 private:
  double max_length_;
  double cache_;
};

template <class T>
std::unique_ptr<Reward> make(Options& options) {
  return std::make_unique<T>(options);
}

}  // namespace

const std::vector<RewardEntry>& builtin_rewards() {
  static const std::vector<RewardEntry> kRewards = {
      {"gsm8k", make<Gsm8kReward>},        {"boxed", make<BoxedReward>},
      {"numeric", make<NumericReward>},    {"exact_match", make<ExactMatchReward>},
      {"format", make<ThinkFormatReward>}, {"regex", make<RegexReward>},
      {"length", make<LengthReward>},
  };
  return kRewards;
}

}  // namespace octet::reward
