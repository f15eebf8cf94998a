// Where prompts and demonstrations come from: a built-in task, or JSON Lines through the tokenizer
// and the chat template. Which row stands at which place of which step is a pure function of the
// seed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "io/jsonl.h"
#include "loop/config.h"
#include "loop/policy.h"
#include "loop/task.h"

namespace octet::loop {

struct PromptRow {
  std::string text;  // as given to the model
  std::vector<int32_t> ids;
  std::shared_ptr<const Json> columns;  // the row's other columns, for rewards
};

// A text to learn: ids[first_target …] are learnt.
struct DemonstrationRow {
  std::vector<int32_t> ids;
  int64_t first_target = 1;
};

class DataSource {
 public:
  // Reads and tokenises everything named in the config. Prompts of more than max_prompt_length
  // tokens, and rows that do not fit into max_seq_length, are left out and counted; an empty rest
  // is an Error. In RL a prompt must leave room for a token.
  DataSource(const TrainConfig& config, const TextSide& text_side);

  int64_t num_train() const { return num_train_; }
  int64_t num_left_out() const { return num_left_out_; }
  const std::vector<PromptRow>& eval() const { return eval_; }
  // What SFT without a reward evaluates on, instead of eval().
  const std::vector<DemonstrationRow>& eval_demonstrations() const { return eval_demonstrations_; }
  int64_t num_eval_left_out() const { return num_eval_left_out_; }

  // The `index`-th prompt (demonstration) of step `step`; epochs are shuffled each in its own
  // order.
  const PromptRow& prompt(int64_t step, int64_t index);
  DemonstrationRow demonstration(int64_t step, int64_t index);

  // Checksums of what was read, for provenance.json.
  Json provenance() const;

 private:
  int64_t row_at(int64_t step, int64_t index);
  void read_files();
  std::string render(Json messages, bool add_generation_prompt, const Json& row,
                     const std::string& where) const;
  void check_answer(const Json& row, const std::string& where) const;
  std::optional<PromptRow> prompt_row(const Json& row, const std::string& where) const;
  std::optional<DemonstrationRow> demonstration_row(const Json& row,
                                                    const std::string& where) const;
  std::vector<int32_t> encode(const std::string& text, const std::string& where) const;
  void add_end_token(std::vector<int32_t>& ids) const;
  bool evaluates_loss() const;

  const TrainConfig& config_;
  const TextSide& text_side_;
  std::optional<ArithmeticTask> task_;
  std::vector<PromptRow> prompts_, eval_;
  std::vector<DemonstrationRow> demonstrations_, eval_demonstrations_;
  int64_t num_train_ = 0;
  int64_t num_left_out_ = 0, num_eval_left_out_ = 0;
  int64_t shuffled_epoch_ = -1;
  std::vector<int64_t> order_;
  std::string train_checksum_, eval_checksum_;
};

}  // namespace octet::loop
