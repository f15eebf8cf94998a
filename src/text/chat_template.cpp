#include "text/chat_template.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/jinja/evaluator.h"
#include "text/jinja/parser.h"
#include "text/utf8.h"

namespace octet::text {

struct ChatTemplate::Data {
  std::string where;
  jinja::Body body;
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

ChatTemplate ChatTemplate::parse(std::string_view source, std::string_view where) {
  if (const size_t at = find_invalid_utf8(source); at != std::string_view::npos) {
    fail(where, "a chat template must be UTF-8, but is not at byte {}", at);
  }
  auto data = std::make_shared<Data>();
  data->where = where;
  data->body = jinja::parse_template(source, where);
  return ChatTemplate(std::move(data));
}

std::string ChatTemplate::render(const ChatInputs& inputs) const {
  using jinja::Value;
  std::vector<std::pair<std::string, Value>> variables;
  try {
    variables.emplace_back("messages", Value::from_json(inputs.messages));
    variables.emplace_back(
        "tools", inputs.tools == nullptr ? Value(jinja::None{}) : Value::from_json(*inputs.tools));
    variables.emplace_back("documents", jinja::None{});
    variables.emplace_back("add_generation_prompt", inputs.add_generation_prompt);
    if (!inputs.bos_token.empty()) variables.emplace_back("bos_token", inputs.bos_token);
    if (!inputs.eos_token.empty()) variables.emplace_back("eos_token", inputs.eos_token);
    if (inputs.kwargs != nullptr) {
      for (const auto& [name, value] : inputs.kwargs->items()) {
        variables.emplace_back(name, Value::from_json(value));
      }
    }
  } catch (const jinja::ValueError& error) {
    fail(data_->where, "the template's input cannot be used: {}", error.message);
  }
  return jinja::render_template(data_->body, std::move(variables), data_->where);
}

}  // namespace octet::text
