#include "app/line_input.h"

#include <fstream>
#include <iostream>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet::app {
namespace {

std::vector<int32_t> read_ids(const Json& json, const std::string& where, int64_t id_limit) {
  if (!json.is_array()) fail(where, "\"ids\" must be an array of integers");
  std::vector<int32_t> ids;
  for (const Json& id : json) {
    if (!id.is_number_integer()) {
      fail(where, "\"ids\" must hold integers, but entry {} is {}", ids.size(), id.dump());
    }
    // Beyond int64 a number is unsigned, and too large in any case.
    const bool huge = id.is_number_unsigned() && id.get<uint64_t>() > uint64_t{INT32_MAX};
    if (huge || id.get<int64_t>() < 0 || id.get<int64_t>() >= id_limit) {
      fail(where, "ids must lie in [0, {}), but entry {} is {}", id_limit, ids.size(), id.dump());
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

}  // namespace

void for_each_line(
    const InputArguments& arguments,
    const std::function<void(const std::string& line, const std::string& where)>& use) {
  if (arguments.texts.empty() == arguments.input.empty()) {
    fail_usage("input", "give texts as arguments, or --input FILE (- for standard input){}",
               arguments.input.empty() ? "" : ", not both");
  }
  for (size_t i = 0; i < arguments.texts.size(); ++i) {
    const Json text = {{"text", arguments.texts[i]}};
    use(text.dump(-1, ' ', false, Json::error_handler_t::replace), fmt::format("text {}", i + 1));
  }
  if (arguments.input.empty()) return;
  const bool standard = arguments.input == "-";
  std::ifstream file;
  if (!standard) {
    file.open(arguments.input, std::ios::binary);
    if (!file) fail(arguments.input, "the file must be readable, but cannot be opened");
  }
  std::istream& stream = standard ? std::cin : file;
  const std::string name = standard ? "standard input" : arguments.input;
  int64_t number = 0;
  int64_t blank = 0;  // lines held back: at the end they are none
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) {
      ++blank;
      continue;
    }
    for (; blank > 0; --blank) use("", fmt::format("{}, line {}", name, ++number));
    use(line, fmt::format("{}, line {}", name, ++number));
  }
  if (stream.bad()) fail(name, "the input must be readable to its end, but reading failed");
}

Line::Line(const std::string& source, const std::string& place, int64_t id_limit)
    : where(place), json(std::make_shared<const Json>(parse_json(source, place))) {
  const Json& object = *json;
  if (!object.is_object())
    fail(where, "a line must be a JSON object, but is {}", object.type_name());
  const bool has_ids = object.contains("ids");
  const bool has_text = object.contains("text");
  if (has_ids + has_text + object.contains("messages") != 1) {
    fail(where, "a line must have exactly one of \"ids\", \"text\" and \"messages\"");
  }
  if (has_ids) {
    kind = LineKind::kIds;
    ids = read_ids(object["ids"], where, id_limit);
  } else if (has_text) {
    if (!object["text"].is_string()) fail(where, "\"text\" must be a string");
    text = object["text"].get<std::string>();
  } else {
    kind = LineKind::kMessages;
    if (!object["messages"].is_array() || object["messages"].empty()) {
      fail(where, "\"messages\" must be an array of at least one message");
    }
  }
}

std::string render_line(const Line& line, const text::Tokenizer* tokenizer,
                        const text::ChatTemplate* chat_template, bool add_generation_prompt) {
  if (tokenizer == nullptr) {
    fail(line.where, "a conversation needs a tokenizer, but the folder has none; give \"ids\"");
  }
  if (chat_template == nullptr) {
    fail(line.where,
         "a conversation needs a chat template, but the folder has none; give "
         "\"text\", or --chat-template to octet tokenize");
  }
  Json kwargs = line.json->value("kwargs", Json::object());
  if (!kwargs.is_object()) fail(line.where, "\"kwargs\" must be an object");
  Json tools = line.json->value("tools", Json());
  if (kwargs.contains("tools")) {
    tools = kwargs["tools"];
    kwargs.erase("tools");
  }
  if (!tools.is_null() && !tools.is_array()) fail(line.where, "\"tools\" must be an array");
  for (const Json* source : {static_cast<const Json*>(&kwargs), line.json.get()}) {
    if (!source->contains("add_generation_prompt")) continue;
    const Json& value = (*source)["add_generation_prompt"];
    if (!value.is_boolean()) fail(line.where, "\"add_generation_prompt\" must be true or false");
    add_generation_prompt = value.get<bool>();
  }
  kwargs.erase("add_generation_prompt");
  const auto token_text = [&](std::optional<int32_t> id) {
    return id ? tokenizer->id_to_token(*id) : std::string_view();
  };
  return chat_template->render({.messages = (*line.json)["messages"],
                                .add_generation_prompt = add_generation_prompt,
                                .tools = tools.is_null() ? nullptr : &tools,
                                .kwargs = &kwargs,
                                .bos_token = token_text(tokenizer->bos_id()),
                                .eos_token = token_text(tokenizer->eos_id())});
}

}  // namespace octet::app
