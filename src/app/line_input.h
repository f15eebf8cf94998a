// The lines of `generate`, `score` and `tokenize`: JSON objects that hold ids, a text or a
// conversation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "app/arguments.h"
#include "base/json.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace octet::app {

// Calls `use` with each line in order and its place for errors ("data.jsonl, line 3"); a text given
// as an argument is the line {"text": …}. Blank lines at the end are none. UsageError unless there
// are arguments or --input, not both.
void for_each_line(
    const InputArguments& arguments,
    const std::function<void(const std::string& line, const std::string& where)>& use);

enum class LineKind { kIds, kText, kMessages };

// Parses a line. Error naming the place unless it is an object with exactly one of "ids" (integers
// in [0, id_limit)), "text" (a string) and "messages" (an array).
struct Line {
  Line(const std::string& text, const std::string& where, int64_t id_limit);

  std::string where;
  LineKind kind = LineKind::kText;
  std::shared_ptr<const Json> json;
  std::vector<int32_t> ids;  // of kIds
  std::string text;          // of kText
};

// The conversation of a kMessages line as text. "add_generation_prompt" and "tools" stand in the
// line or within its "kwargs", as transformers' apply_chat_template takes them. Null pointers where
// the folder has no tokenizer or template are errors.
std::string render_line(const Line& line, const text::Tokenizer* tokenizer,
                        const text::ChatTemplate* chat_template, bool add_generation_prompt);

}  // namespace octet::app
