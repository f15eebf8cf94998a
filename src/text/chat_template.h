// Chat templates: the subset of Jinja that the templates of Hugging Face models use, rendered as
// transformers does (trim_blocks, lstrip_blocks, loop controls, {% generation %}, tojson as
// Python's json.dumps with ensure_ascii=False, raise_exception, strftime_now).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"

namespace octet::text {

struct ChatInputs {
  const Json& messages;                // [{"role": …, "content": …}, …]
  bool add_generation_prompt = false;  // ends with the header of the answer to come
  const Json* tools = nullptr;         // a list of function schemas; null: none
  const Json* kwargs = nullptr;        // an object of further variables, such as enable_thinking
  std::string_view bos_token = {};     // empty: undefined in the template
  std::string_view eos_token = {};
};

// A parsed template; cheap to copy, immutable, usable from any thread.
class ChatTemplate {
 public:
  // Syntax errors, unknown filters, tests and statements are errors that name `where` and the line.
  static ChatTemplate parse(std::string_view source, std::string_view where);

  // Errors name the line. What the template raises by raise_exception becomes an octet::Error with
  // its message. Depth, steps and output are bounded, so that no template can hang or crash.
  std::string render(const ChatInputs& inputs) const;

 private:
  struct Data;
  explicit ChatTemplate(std::shared_ptr<const Data> data);
  std::shared_ptr<const Data> data_;
};

}  // namespace octet::text
