#include "text/tokenizer_data.h"

#include <utility>

#include "base/error.h"

namespace octet::text {

Tokenizer::Data Tokenizer::Data::from_json(const JsonNode& root) {
  Data data;
  data.where = root.where();
  data.normalizer = Normalizer::from_json(root.find("normalizer"));
  data.pre_tokenizer = PreTokenizer::from_json(root.find("pre_tokenizer"));
  data.decoder = Decoder::from_json(root.at("decoder"));
  data.bpe = Bpe::from_json(root.at("model"));
  for (const auto& [text, id] : data.bpe.vocabulary()) data.set_token(root, id, text);
  if (const auto added = root.find("added_tokens")) data.read_added_tokens(*added);
  if (const auto processor = root.find("post_processor")) data.add_post_processor(*processor);
  return data;
}

void Tokenizer::Data::set_token(const JsonNode& node, int32_t id, std::string text) {
  if (tokens.size() <= static_cast<size_t>(id)) tokens.resize(id + 1);
  Token& token = tokens[id];
  if (token.exists && token.text != text) {
    node.fail_must(fmt::format("a token with an id of its own, as {} is \"{}\"", id, token.text));
  }
  token.bytes = decoder.token_bytes(text);
  token.is_byte = decoder.is_byte_token(text);
  token.text = std::move(text);
  token.exists = true;
}

void Tokenizer::Data::read_added_tokens(const JsonNode& node) {
  node.for_each_element([&](const JsonNode& entry) {
    const auto flag = [&](std::string_view key) {
      const auto value = entry.find(key);
      return value && value->boolean();
    };
    AddedToken token;
    token.id = static_cast<int32_t>(entry.at("id").integer(0, kMaxTokens - 1));
    token.content = entry.at("content").string();
    token.special = flag("special");
    token.normalized = flag("normalized");
    token.single_word = flag("single_word");
    token.lstrip = flag("lstrip");
    token.rstrip = flag("rstrip");
    if (token.content.empty()) entry.at("content").fail_must("a text that is not empty");
    set_token(entry, token.id, token.content);
    if (!added_ids.emplace(token.content, token.id).second) {
      entry.at("content").fail_must("given once");
    }
    tokens[token.id].special = token.special;
    const std::string content = token.normalized ? normalizer.apply(token.content) : token.content;
    if (!content.empty()) (token.normalized ? normalized_added : raw_added).add(token, content);
  });
}

void Tokenizer::Data::add_post_processor(const JsonNode& node) {
  const JsonNode type = node.at("type");
  if (type.string() == "Sequence") {
    node.at("processors").for_each_element([&](const JsonNode& child) {
      add_post_processor(child);
    });
  } else if (type.string() == "TemplateProcessing") {
    bool before = true;
    std::vector<int32_t> first, last;
    node.at("single").for_each_element([&](const JsonNode& piece) {
      if (piece.find("Sequence")) {
        if (!before) piece.fail_must("a special token, as the text stands once in the template");
        before = false;
        return;
      }
      const JsonNode name = piece.at("SpecialToken").at("id");
      node.at("special_tokens")
          .at(name.string())
          .at("ids")
          .for_each_element([&](const JsonNode& id) {
            const auto value = static_cast<int32_t>(id.integer(0, kMaxTokens - 1));
            if (value >= std::ssize(tokens) || !tokens[value].exists) {
              id.fail_must("the id of a token of the vocabulary");
            }
            (before ? first : last).push_back(value);
          });
    });
    if (before) node.at("single").fail_must("a template with the text, {\"Sequence\": …}, in it");
    prefix.insert(prefix.begin(), first.begin(), first.end());
    suffix.insert(suffix.end(), last.begin(), last.end());
  } else if (type.string() != "ByteLevel") {  // which only moves offsets
    type.fail_must("a post-processor that is known (ByteLevel, TemplateProcessing, Sequence)");
  }
}

void Tokenizer::Data::read_config(const JsonNode& root) {
  const auto id_of = [&](std::string_view key) -> std::optional<int32_t> {
    const auto value = root.find(key);
    if (!value) return std::nullopt;
    const auto id = find(value->is_object() ? value->at("content").string() : value->string());
    if (!id) value->fail_must("a token of tokenizer.json");
    return id;
  };
  bos_id = id_of("bos_token");
  eos_id = id_of("eos_token");
  pad_id = id_of("pad_token");
  const auto chat_template = root.find("chat_template");
  if (!chat_template) return;
  if (!chat_template->is_array()) {
    chat_templates["default"] = chat_template->string();
    return;
  }
  chat_template->for_each_element([&](const JsonNode& entry) {
    chat_templates[entry.at("name").string()] = entry.at("template").string();
  });
}

const Tokenizer::Data::Token& Tokenizer::Data::token(int32_t id) const {
  if (id < 0 || id >= std::ssize(tokens) || !tokens[id].exists) {
    fail(where,
         "an id must be one of the vocabulary's (0 to {}), but is {}; does the tokenizer "
         "belong to the model?",
         std::ssize(tokens) - 1, id);
  }
  return tokens[id];
}

std::optional<int32_t> Tokenizer::Data::find(std::string_view token) const {
  const std::string key(token);
  if (const auto added = added_ids.find(key); added != added_ids.end()) return added->second;
  const auto entry = bpe.vocabulary().find(key);
  if (entry == bpe.vocabulary().end()) return std::nullopt;
  return entry->second;
}

}  // namespace octet::text
