#include "text/tokenizer.h"

#include <filesystem>
#include <utility>

#include <zlib.h>

#include "base/error.h"
#include "base/strings.h"
#include "text/byte_level.h"
#include "text/tokenizer_data.h"
#include "text/utf8.h"

namespace octet::text {
namespace {

// The file's bytes, unpacked where it is gzip.
std::string read_maybe_gzip(const std::string& path) {
  if (!path.ends_with(".gz")) return read_file(path);
  constexpr size_t kMaxBytes = size_t{1} << 30;
  const std::unique_ptr<gzFile_s, decltype(&gzclose)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (file == nullptr) fail(path, "the file cannot be read; check the path");
  std::string content;
  std::string chunk(1 << 16, '\0');
  int count = 0;
  while ((count = gzread(file.get(), chunk.data(), static_cast<unsigned>(chunk.size()))) > 0) {
    content.append(chunk, 0, static_cast<size_t>(count));
    if (content.size() > kMaxBytes) fail(path, "the unpacked file must stay below 1 GiB");
  }
  int error = Z_OK;
  const char* reason = gzerror(file.get(), &error);
  if (count < 0 || error != Z_OK) {
    fail(path, "the file must be gzip data, complete and whole, but: {}",
         *reason != '\0' ? reason : "it is cut short");
  }
  return content;
}

// "path" or else "path.gz", whichever is there; empty where neither is.
std::string find_maybe_gzip(const std::filesystem::path& path) {
  for (const std::string& name : {path.string(), path.string() + ".gz"}) {
    if (std::filesystem::is_regular_file(name)) return name;
  }
  return "";
}

// For a character, or a byte of the byte-level alphabet, that has no token: names the character of
// the text at or after byte `from` that it is or is part of.
[[noreturn]] void fail_missing(std::string_view where, std::string_view text, size_t from,
                               const std::string& missing) {
  const std::string bytes = alphabet_to_bytes(missing).value_or(missing);
  for (size_t i = from; i < text.size();) {
    const size_t length = code_point_at(text, i).length;
    const std::string_view character = text.substr(i, length);
    if (character == missing || character.find(bytes) != std::string_view::npos) {
      fail(
          where,
          "text must consist of characters of the vocabulary, but has \"{}\" at byte {}, for which "
          "there is neither a token nor an unknown token",
          character, i);
    }
    i += length;
  }
  fail(where, "text must consist of characters of the vocabulary, but has \"{}\" once normalised",
       missing);
}

}  // namespace

Tokenizer::Tokenizer(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

Tokenizer Tokenizer::from_json(std::string_view json, std::string_view where) {
  return Tokenizer(std::make_shared<Data>(Data::from_json(JsonNode::parse(json, where))));
}

Tokenizer Tokenizer::load(const std::string& path) {
  const bool is_folder = std::filesystem::is_directory(path);
  const std::filesystem::path folder(path);
  const std::string file = is_folder ? find_maybe_gzip(folder / "tokenizer.json") : path;
  if (file.empty()) {
    fail(path,
         "a folder with a tokenizer.json is required, but it has none; take the model's folder "
         "with all of its files");
  }
  Data data = Data::from_json(JsonNode::parse(read_maybe_gzip(file), file));
  if (is_folder) {
    if (const std::string config = find_maybe_gzip(folder / "tokenizer_config.json");
        !config.empty()) {
      data.read_config(JsonNode::parse(read_maybe_gzip(config), config));
    }
    if (const std::string jinja = (folder / "chat_template.jinja").string();
        std::filesystem::is_regular_file(jinja)) {
      data.chat_templates["default"] = read_file(jinja);
    }
  }
  return Tokenizer(std::make_shared<Data>(std::move(data)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const Data& data = *data_;
  if (const size_t at = find_invalid_utf8(text); at != std::string_view::npos) {
    fail(data.where, "text must be UTF-8, but is not at byte {}", at);
  }
  std::vector<int32_t> ids;
  if (options.add_special_tokens) ids = data.prefix;
  Bpe::Scratch scratch;
  const auto on_token = [&](int32_t id) { ids.push_back(id); };
  const auto on_word = [&](std::string_view word) { data.bpe.encode_word(word, scratch, ids); };
  const auto on_normalized = [&](std::string_view piece) {
    data.pre_tokenizer.split(piece, on_word);
  };
  const auto on_raw = [&](std::string_view piece) {
    try {
      if (data.normalizer.empty()) {
        data.normalized_added.split(piece, options.parse_special, on_normalized, on_token);
      } else {
        data.normalized_added.split(data.normalizer.apply(std::string(piece)),
                                    options.parse_special, on_normalized, on_token);
      }
    } catch (const MissingCharacter& missing) {
      // The offset is one of the whole text.
      const auto before = static_cast<size_t>(piece.data() - text.data());
      fail_missing(data.where, text, before, missing.character);
    }
  };
  data.raw_added.split(text, options.parse_special, on_raw, on_token);
  if (options.add_special_tokens) ids.insert(ids.end(), data.suffix.begin(), data.suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, const DecodeOptions& options) const {
  IncrementalDecoder decoder(*this, options);
  std::string text;
  for (const int32_t id : ids) text += decoder.push(id);
  return text += decoder.finish();
}

int64_t Tokenizer::size() const { return std::ssize(data_->tokens); }

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  return data_->find(token);
}

bool Tokenizer::contains(int32_t id) const {
  return id >= 0 && id < size() && data_->tokens[id].exists;
}

std::string_view Tokenizer::id_to_token(int32_t id) const { return data_->token(id).text; }
std::string_view Tokenizer::id_to_bytes(int32_t id) const { return data_->token(id).bytes; }
bool Tokenizer::is_special(int32_t id) const { return data_->token(id).special; }
std::optional<int32_t> Tokenizer::bos_id() const { return data_->bos_id; }
std::optional<int32_t> Tokenizer::eos_id() const { return data_->eos_id; }
std::optional<int32_t> Tokenizer::pad_id() const { return data_->pad_id; }

const std::string* Tokenizer::chat_template(std::string_view name) const {
  const auto found = data_->chat_templates.find(name);
  return found == data_->chat_templates.end() ? nullptr : &found->second;
}

IncrementalDecoder::IncrementalDecoder(Tokenizer tokenizer, const DecodeOptions& options)
    : tokenizer_(std::move(tokenizer)), options_(options) {}

std::string IncrementalDecoder::push(int32_t id) {
  const Tokenizer::Data& data = *tokenizer_.data_;
  const auto& token = data.token(id);
  if (options_.skip_special_tokens && token.special) return "";
  std::string text;
  if (!token.is_byte && data.decoder.byte_fallback()) text = take_byte_run();
  pending_ += token.bytes;
  if (!token.is_byte) move_lossy_utf8(pending_, text, false);
  return strip(std::move(text));
}

std::string IncrementalDecoder::finish() {
  const Tokenizer::Data& data = *tokenizer_.data_;
  std::string text;
  if (data.decoder.byte_fallback()) text = take_byte_run();
  move_lossy_utf8(pending_, text, true);
  text = strip(std::move(text));
  at_start_ = true;
  return text;
}

// A run of byte tokens that is no UTF-8 as a whole becomes one U+FFFD per byte, as in Hugging Face.
std::string IncrementalDecoder::take_byte_run() {
  std::string run = std::exchange(pending_, "");
  if (find_invalid_utf8(run) == std::string_view::npos) return run;
  std::string text;
  for (size_t i = 0; i < run.size(); ++i) append_utf8(text, 0xFFFD);
  return text;
}

std::string IncrementalDecoder::strip(std::string text) {
  if (text.empty() || !at_start_) return text;
  at_start_ = false;
  if (tokenizer_.data_->decoder.strips_leading_space() && text.front() == ' ') text.erase(0, 1);
  return text;
}

}  // namespace octet::text
