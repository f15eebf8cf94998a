#include "loop/data_source.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rng.h"
#include "base/strings.h"

namespace octet::loop {
namespace {

const Json& required_field(const Json& row, const std::string& field, const char* key,
                           const std::string& where) {
  const auto found = row.find(field);
  if (found == row.end()) {
    std::vector<std::string> names;
    for (const auto& item : row.items()) names.push_back(item.key());
    const std::string nearest = nearest_name(field, names);
    fail(where, "the row must have the column \"{}\" ({}), but has {}{}", field, key,
         fmt::join(names, ", "),
         nearest.empty() ? "; set the key to one of them"
                         : fmt::format("; did you mean \"{}\"?", nearest));
  }
  return *found;
}

std::string row_name(const std::string& path, size_t index) {
  return fmt::format("{}, row {}", path, index + 1);
}

// What is left after rows were left out.
void check_rest(const std::string& path, int64_t num_left, size_t num_rows) {
  if (num_left > 0) return;
  fail(path,
       "at least one row must fit, but all {} are longer than max_prompt_length or max_seq_length",
       num_rows);
}

// Plain completions, or the content of a conversational one (TRL's [{"role", "content"}]).
std::string completion_text(const Json& value, const std::string& where) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array() && value.size() == 1 && value[0].contains("content") &&
      value[0]["content"].is_string()) {
    return value[0]["content"].get<std::string>();
  }
  fail(where, "a completion must be a text or a list of one message, but is {}",
       value.dump().substr(0, 80));
}

}  // namespace

DataSource::DataSource(const TrainConfig& config, const TextSide& text_side)
    : config_(config), text_side_(text_side) {
  const DataSection& data = config.data;
  if (data.task.empty()) {
    read_files();
  } else {
    task_.emplace(data.task_digits, data.task_eval_size, data.task_seed);
    const auto to_row = [&](const Problem& problem) {
      PromptRow row;
      row.text = problem.prompt;
      row.ids = encode(problem.prompt, "data.task");
      row.columns = std::make_shared<Json>(Json{{"answer", problem.answer}});
      return row;
    };
    for (const Problem& problem : task_->train()) prompts_.push_back(to_row(problem));
    for (const Problem& problem : task_->eval()) eval_.push_back(to_row(problem));
    num_train_ = static_cast<int64_t>(prompts_.size());
  }
  if (data.max_eval_samples > 0 && static_cast<int64_t>(eval_.size()) > data.max_eval_samples) {
    eval_.resize(static_cast<size_t>(data.max_eval_samples));
  }
}

std::vector<int32_t> DataSource::encode(const std::string& text, const std::string& where) const {
  if (!text_side_.tokenizer) {
    fail("data", "texts need a tokenizer, but the model's folder has none; add tokenizer.json");
  }
  try {
    return text_side_.tokenizer->encode(text);
  } catch (const Error& error) {
    fail(where, "{}", error.what());
  }
}

void DataSource::add_end_token(std::vector<int32_t>& ids) const {
  if (!text_side_.stop_ids.empty()) {
    ids.push_back(text_side_.tokenizer->eos_id().value_or(text_side_.stop_ids[0]));
  }
}

void DataSource::read_files() {
  const DataSection& data = config_.data;
  const io::Dataset train = io::read_jsonl(data.train);
  train_checksum_ = fmt::format("crc32:{:08x}", train.crc32);
  for (size_t i = 0; i < train.rows.size(); ++i) {
    const std::string where = row_name(data.train, i);
    if (config_.is_rl()) {
      check_answer(train.rows[i], where);
      if (auto row = prompt_row(train.rows[i], where)) {
        prompts_.push_back(std::move(*row));
      } else {
        ++num_left_out_;
      }
    } else {
      if (auto row = demonstration_row(train.rows[i], where)) {
        demonstrations_.push_back(std::move(*row));
      } else {
        ++num_left_out_;
      }
    }
  }
  num_train_ = static_cast<int64_t>(config_.is_rl() ? prompts_.size() : demonstrations_.size());
  check_rest(data.train, num_train_, train.rows.size());
  if (data.eval.empty()) return;
  const io::Dataset eval = io::read_jsonl(data.eval);
  eval_checksum_ = fmt::format("crc32:{:08x}", eval.crc32);
  int64_t num_eval = 0;
  for (size_t i = 0; i < eval.rows.size(); ++i) {
    if (data.max_eval_samples > 0 && num_eval == data.max_eval_samples) break;
    const std::string where = row_name(data.eval, i);
    bool fits = false;
    if (evaluates_loss()) {
      if (auto row = demonstration_row(eval.rows[i], where)) {
        eval_demonstrations_.push_back(std::move(*row));
        fits = true;
      }
    } else {
      check_answer(eval.rows[i], where);
      if (auto row = prompt_row(eval.rows[i], where)) {
        eval_.push_back(std::move(*row));
        fits = true;
      }
    }
    ++(fits ? num_eval : num_eval_left_out_);
  }
  check_rest(data.eval, num_eval, eval.rows.size());
}

// Without a reward a greedy answer has no value; then the loss on held-out demonstrations has.
bool DataSource::evaluates_loss() const {
  return config_.reward.functions.empty() && config_.reward.command.empty();
}

// The column that the answer rewards compare with must be there; null gives no reward.
void DataSource::check_answer(const Json& row, const std::string& where) const {
  const std::string& field = config_.data.answer_field;
  if (row.contains(field)) return;
  for (const std::string& name : config_.reward.functions) {
    if (name == "format" || name == "regex" || name == "length") continue;
    required_field(row, split(field, '.')[0], "data.answer_field", where);
  }
}

// A conversation as the chat template has it, with the system prompt where it has none of its own.
std::string DataSource::render(Json messages, bool add_generation_prompt, const Json& row,
                               const std::string& where) const {
  for (const Json& message : messages) {
    if (message.is_object() && message.contains("role") && message["role"].is_string()) continue;
    fail(where, "a message must be an object with a \"role\", but is {}",
         message.dump().substr(0, 80));
  }
  const DataSection& data = config_.data;
  if (!data.system_prompt.empty() && messages[0]["role"] != "system") {
    const Json system = {{"role", "system"}, {"content", data.system_prompt}};
    messages.insert(messages.begin(), system);
  }
  const Json kwargs = parse_json(data.chat_template_kwargs.text, "data.chat_template_kwargs");
  const auto tools = row.find("tools");
  try {
    return text_side_.render(messages, add_generation_prompt,
                             tools == row.end() ? nullptr : &*tools, &kwargs);
  } catch (const Error& error) {
    fail(where, "{}", error.what());
  }
}

std::optional<PromptRow> DataSource::prompt_row(const Json& row, const std::string& where) const {
  const DataSection& data = config_.data;
  const Json& prompt = required_field(row, data.prompt_field, "data.prompt_field", where);
  PromptRow result;
  if (prompt.is_array() && !prompt.empty()) {
    result.text = render(prompt, true, row, where);
  } else if (!prompt.is_string()) {
    fail(where, "the column \"{}\" must be a text or a list of messages, but is {}",
         data.prompt_field, prompt.dump().substr(0, 80));
  } else if (text_side_.chat_template) {
    const Json message = {{"role", "user"}, {"content", prompt}};
    result.text = render(Json::array({message}), true, row, where);
  } else {
    result.text =
        (data.system_prompt.empty() ? "" : data.system_prompt + "\n") + prompt.get<std::string>();
  }
  result.ids = encode(result.text, where);
  const auto length = static_cast<int64_t>(result.ids.size());
  if (length == 0) fail(where, "a prompt must have at least one token, but is empty");
  if (data.max_prompt_length > 0 && length > data.max_prompt_length) return std::nullopt;
  if (length >= config_.model.max_seq_length) return std::nullopt;
  auto columns = std::make_shared<Json>(row);
  columns->erase(data.prompt_field);
  result.columns = std::move(columns);
  return result;
}

std::optional<DemonstrationRow> DataSource::demonstration_row(const Json& row,
                                                              const std::string& where) const {
  const DataSection& data = config_.data;
  std::string prompt, completion;
  if (row.contains("messages")) {
    Json messages = row["messages"];
    if (!messages.is_array() || messages.size() < 2 || !messages.back().is_object() ||
        messages.back().value("role", Json()) != "assistant") {
      fail(where,
           "\"messages\" must be a list of at least two that ends with the assistant's message");
    }
    const std::string whole = render(messages, false, row, where);
    messages.erase(messages.size() - 1);
    prompt = render(messages, true, row, where);
    if (whole.compare(0, prompt.size(), prompt) != 0) {
      fail(where,
           "the chat template must render a conversation as its beginning and the answer, but "
           "does not; give prompt and completion instead");
    }
    completion = whole.substr(prompt.size());
  } else if (!row.contains(data.prompt_field) && row.contains("text") && row["text"].is_string()) {
    completion = row["text"].get<std::string>();
  } else {
    const std::optional<PromptRow> prompt_part = prompt_row(row, where);
    if (!prompt_part) return std::nullopt;
    prompt = prompt_part->text;
    completion = completion_text(
        required_field(row, data.completion_field, "data.completion_field", where), where);
  }
  DemonstrationRow result;
  result.ids = encode(prompt, where);
  const auto prompt_length = static_cast<int64_t>(result.ids.size());
  if (data.max_prompt_length > 0 && prompt_length > data.max_prompt_length) return std::nullopt;
  const std::vector<int32_t> tail = encode(completion, where);
  result.ids.insert(result.ids.end(), tail.begin(), tail.end());
  if (!row.contains("messages")) add_end_token(result.ids);
  result.first_target =
      config_.algorithm.completion_only_loss ? std::max<int64_t>(1, prompt_length) : 1;
  const auto length = static_cast<int64_t>(result.ids.size());
  if (length <= result.first_target) {
    fail(where, "a text to learn must have a token after its first and its prompt's, but has {}",
         length);
  }
  if (length > config_.model.max_seq_length) return std::nullopt;
  return result;
}

int64_t DataSource::row_at(int64_t step, int64_t index) {
  const int64_t position = step * config_.train.prompts_per_step + index;
  const int64_t epoch = position / num_train_;
  if (epoch != shuffled_epoch_) {
    order_.resize(static_cast<size_t>(num_train_));
    std::iota(order_.begin(), order_.end(), int64_t{0});
    RandomSequence random(
        {.seed = static_cast<uint64_t>(config_.run.seed), .step = static_cast<uint32_t>(epoch)},
        RngUse::kShuffle);
    for (int64_t i = num_train_ - 1; config_.data.shuffle && i > 0; --i) {
      std::swap(order_[i], order_[random.next_below(static_cast<uint32_t>(i + 1))]);
    }
    shuffled_epoch_ = epoch;
  }
  return order_[position % num_train_];
}

const PromptRow& DataSource::prompt(int64_t step, int64_t index) {
  return prompts_[row_at(step, index)];
}

DemonstrationRow DataSource::demonstration(int64_t step, int64_t index) {
  const int64_t row = row_at(step, index);
  if (!task_) return demonstrations_[row];
  const std::string answer = ArithmeticTask::demonstrate(
      task_->train()[row], config_.data.task_wrong_share, config_.run.seed, step, index);
  DemonstrationRow result;
  result.ids = prompts_[row].ids;
  result.first_target = static_cast<int64_t>(result.ids.size());
  const std::vector<int32_t> tail = encode(answer, "data.task");
  result.ids.insert(result.ids.end(), tail.begin(), tail.end());
  add_end_token(result.ids);
  return result;
}

Json DataSource::provenance() const {
  Json result = Json::object();
  if (task_) result["task"] = config_.data.task;
  if (!train_checksum_.empty())
    result["train"] = {{"path", config_.data.train}, {"checksum", train_checksum_}};
  if (!eval_checksum_.empty())
    result["eval"] = {{"path", config_.data.eval}, {"checksum", eval_checksum_}};
  result["num_train"] = num_train_;
  result["num_left_out"] = num_left_out_;
  result["num_eval"] = std::max(eval_.size(), eval_demonstrations_.size());
  result["num_eval_left_out"] = num_eval_left_out_;
  return result;
}

}  // namespace octet::loop
