#include "io/gguf_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace octet::io {
namespace {

enum TokenType : int64_t { kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5 };

// The splitting rule that Qwen2 and Llama 3 share, but for how many digits go together.
std::string split_regex(const char* digits) {
  return fmt::format(
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}| ?[^\s\p{{L}}\p{{N}}]+)"
      R"([\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      digits);
}

Json byte_level(bool add_prefix_space, bool trim_offsets, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", trim_offsets},
          {"use_regex", use_regex}};
}

Json sequence(const char* items_key, Json items) {
  Json result = {{"type", "Sequence"}};
  result[items_key] = std::move(items);
  return result;
}

Json split_then_bytes(const char* digits) {
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", split_regex(digits)}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  return sequence("pretokenizers", Json::array({split, byte_level(false, false, false)}));
}

// What `tokenizer.ggml.pre` stands for.
struct Recipe {
  Json normalizer;
  Json pre_tokenizer;
  bool ignore_merges = false;
  bool add_bos = false;  // where the file does not say
};

Recipe find_recipe(const GgufFile& file) {
  const std::string model = file.get_string("tokenizer.ggml.model");
  if (model != "gpt2") {
    fail(file.path(),
         "the tokenizer kind \"gpt2\" (byte-level BPE) is required, but it is \"{}\", which is not "
         "read yet",
         model);
  }
  const std::string pre = file.get_string("tokenizer.ggml.pre", "");
  Recipe recipe;
  if (pre == "gpt-2" || pre == "phi-2") {
    recipe.pre_tokenizer = byte_level(false, true, true);
  } else if (pre == "smollm") {
    const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
    recipe.pre_tokenizer =
        sequence("pretokenizers", Json::array({digits, byte_level(false, true, true)}));
  } else if (pre == "qwen2") {
    recipe.normalizer = {{"type", "NFC"}};
    recipe.pre_tokenizer = split_then_bytes(R"(\p{N})");
  } else if (pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3") {
    recipe.pre_tokenizer = split_then_bytes(R"(\p{N}{1,3})");
    recipe.ignore_merges = true;
    recipe.add_bos = true;
  } else {
    fail(file.path(),
         "the pre-tokenizer must be gpt-2, phi-2, smollm, qwen2 or llama-bpe, but is \"{}\", which "
         "is not read yet",
         pre);
  }
  return recipe;
}

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int64_t> types;
  std::unordered_map<std::string, int64_t> ids;  // of tokens in use
};

Vocabulary read_vocabulary(const GgufFile& file) {
  Vocabulary vocabulary;
  vocabulary.tokens = file.get_strings("tokenizer.ggml.tokens");
  vocabulary.types.assign(vocabulary.tokens.size(), kNormal);
  if (file.has_key("tokenizer.ggml.token_type")) {
    vocabulary.types = file.get_ints("tokenizer.ggml.token_type");
  }
  if (vocabulary.types.size() != vocabulary.tokens.size()) {
    fail(file.path(), "each of the {} tokens needs a type, but {} types are given",
         vocabulary.tokens.size(), vocabulary.types.size());
  }
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string& token = vocabulary.tokens[id];
    if (vocabulary.types[id] == kUnused) continue;  // padding of the embedding matrix
    if (!is_valid_utf8(token)) fail(file.path(), "token {} must be UTF-8, but is not", id);
    if (!vocabulary.ids.emplace(token, static_cast<int64_t>(id)).second) {
      fail(file.path(), "token \"{}\" must stand once, but stands twice", token);
    }
  }
  return vocabulary;
}

// The token that a key like tokenizer.ggml.bos_token_id names, or nullptr without the key.
const std::string* named_token(const GgufFile& file, const Vocabulary& vocabulary,
                               const std::string& key) {
  if (!file.has_key(key)) return nullptr;
  const int64_t id = file.get_int(key);
  if (id < 0 || id >= std::ssize(vocabulary.tokens)) {
    fail(file.path(), "\"{}\" must be below the {} tokens, but is {}", key,
         vocabulary.tokens.size(), id);
  }
  return &vocabulary.tokens[static_cast<size_t>(id)];
}

Json added_tokens(const Vocabulary& vocabulary) {
  Json added = Json::array();
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const int64_t type = vocabulary.types[id];
    if (type != kControl && type != kUserDefined) continue;
    added.push_back({{"id", id},
                     {"content", vocabulary.tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", type == kControl}});
  }
  return added;
}

// Puts the begin and end tokens around a text where the file asks for it.
Json post_processor(const GgufFile& file, const Vocabulary& vocabulary, bool default_bos) {
  const Json bytes = byte_level(true, false, true);
  Json special = Json::object();
  const auto mark = [&](const char* flag, bool fallback, const char* key) -> Json {
    if (!file.get_bool(flag, fallback)) return nullptr;
    const std::string* token = named_token(file, vocabulary, key);
    if (token == nullptr) fail(file.path(), "\"{}\" is set and needs \"{}\"", flag, key);
    special[*token] = {{"id", *token},
                       {"ids", Json::array({file.get_int(key)})},
                       {"tokens", Json::array({*token})}};
    return *token;
  };
  const Json begin =
      mark("tokenizer.ggml.add_bos_token", default_bos, "tokenizer.ggml.bos_token_id");
  const Json end = mark("tokenizer.ggml.add_eos_token", false, "tokenizer.ggml.eos_token_id");
  if (special.empty()) return bytes;
  const auto pieces = [&](std::initializer_list<const char*> texts) {
    Json result = Json::array();
    int type_id = 0;
    for (const char* text : texts) {
      const auto add = [&](const char* kind, const Json& id) {
        Json piece = Json::object();
        piece[kind] = {{"id", id}, {"type_id", type_id}};
        result.push_back(std::move(piece));
      };
      if (!begin.is_null()) add("SpecialToken", begin);
      add("Sequence", text);
      if (!end.is_null()) add("SpecialToken", end);
      ++type_id;
    }
    return result;
  };
  const Json around = {{"type", "TemplateProcessing"},
                       {"single", pieces({"A"})},
                       {"pair", pieces({"A", "B"})},
                       {"special_tokens", special}};
  return sequence("processors", Json::array({bytes, around}));
}

// The BPE model as text: an object of this many keys is built faster by hand.
std::string bpe_model(const GgufFile& file, const Vocabulary& vocabulary, bool ignore_merges) {
  std::string text = fmt::format(
      R"({{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,)"
      R"("end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":{},)"
      R"("vocab":{{)",
      ignore_merges);
  const char* separator = "";
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    if (vocabulary.types[id] == kUnused) continue;
    fmt::format_to(std::back_inserter(text), "{}{}:{}", separator,
                   Json(vocabulary.tokens[id]).dump(), id);
    separator = ",\n";
  }
  text += "},\"merges\":[";
  separator = "";
  for (const std::string& merge : file.get_strings("tokenizer.ggml.merges")) {
    const size_t space = merge.find(' ', 1);
    const std::string left = merge.substr(0, space);
    const std::string right = space == std::string::npos ? "" : merge.substr(space + 1);
    if (!vocabulary.ids.contains(left) || !vocabulary.ids.contains(right) ||
        !vocabulary.ids.contains(left + right)) {
      fail(file.path(), "a merge must join two tokens to a third, but \"{}\" does not",
           is_valid_utf8(merge) ? merge : "(no UTF-8)");
    }
    fmt::format_to(std::back_inserter(text), "{}[{},{}]", separator, Json(left).dump(),
                   Json(right).dump());
    separator = ",\n";
  }
  return text + "]}";
}

Json tokenizer_config(const GgufFile& file, const Vocabulary& vocabulary, bool default_bos) {
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"add_bos_token", file.get_bool("tokenizer.ggml.add_bos_token", default_bos)},
                 {"add_prefix_space", false},
                 {"clean_up_tokenization_spaces", false}};
  for (const auto& [name, key] : {std::pair("bos_token", "tokenizer.ggml.bos_token_id"),
                                  std::pair("eos_token", "tokenizer.ggml.eos_token_id"),
                                  std::pair("pad_token", "tokenizer.ggml.padding_token_id"),
                                  std::pair("unk_token", "tokenizer.ggml.unknown_token_id")}) {
    const std::string* token = named_token(file, vocabulary, key);
    config[name] = token == nullptr ? Json(nullptr) : Json(*token);
  }
  const std::string context = file.get_string("general.architecture") + ".context_length";
  config["model_max_length"] = file.get_int(context);
  if (file.has_key("tokenizer.chat_template")) {
    config["chat_template"] = file.get_string("tokenizer.chat_template");
  }
  return config;
}

}  // namespace

void write_gguf_tokenizer(const GgufFile& file, const std::string& folder) {
  const Recipe recipe = find_recipe(file);
  const Vocabulary vocabulary = read_vocabulary(file);
  const Json post = post_processor(file, vocabulary, recipe.add_bos);
  const std::string text = fmt::format(
      "{{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\n\"added_tokens\":{},\n"
      "\"normalizer\":{},\n\"pre_tokenizer\":{},\n\"post_processor\":{},\n\"decoder\":{},\n"
      "\"model\":{}}}\n",
      added_tokens(vocabulary).dump(), recipe.normalizer.dump(), recipe.pre_tokenizer.dump(),
      post.dump(), byte_level(true, true, true).dump(),
      bpe_model(file, vocabulary, recipe.ignore_merges));
  const std::filesystem::path path(folder);
  write_file_atomically((path / "tokenizer.json").string(), text);
  write_file_atomically((path / "tokenizer_config.json").string(),
                        tokenizer_config(file, vocabulary, recipe.add_bos).dump(2) + "\n");
}

}  // namespace octet::io
