// Hugging Face tokenizers (tokenizer.json): text to token ids and back.
//
// Byte-level BPE of the Qwen3, Llama 3, GPT-2, Phi-2 and SmolLM2 kinds, with their normalizers,
// pre-tokenizers, added tokens and post-processors. A component that is not known is an error that
// names it; nothing is skipped in silence.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace octet::text {

struct EncodeOptions {
  // Adds what the post-processor's template adds, such as <|begin_of_text|>. Leave it off for text
  // that a chat template rendered: the template has written such tokens itself.
  bool add_special_tokens = false;
  // Off: the text of a token flagged special is taken as plain text, for text that is not trusted.
  // Added tokens that are not special, such as <think>, are found in either case.
  bool parse_special = true;
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

// Cheap to copy; copies share one immutable vocabulary, so any thread may use any copy.
class Tokenizer {
 public:
  // A folder with tokenizer.json (and, where present, tokenizer_config.json and
  // chat_template.jinja), or the path of a tokenizer.json; ".gz" is understood for the JSON files.
  static Tokenizer load(const std::string& path);
  // From the text of a tokenizer.json; errors name `where`.
  static Tokenizer from_json(std::string_view json, std::string_view where);

  // The text must be UTF-8 (an error names the byte offset). A character for which the vocabulary
  // has neither token, bytes nor an unknown token is an error that names it and its offset, where
  // Hugging Face would drop it.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // Bytes that are no UTF-8 become U+FFFD; spaces are never cleaned up. An unknown id is an error.
  std::string decode(std::span<const int32_t> ids, const DecodeOptions& options = {}) const;

  // The highest id + 1, added tokens included. Not every id below need have a token.
  int64_t size() const;
  std::optional<int32_t> token_to_id(std::string_view token) const;
  bool contains(int32_t id) const;
  // As written in tokenizer.json ("Ġthe"); an unknown id is an error. Lives as long as any copy.
  std::string_view id_to_token(int32_t id) const;
  // The bytes that the id stands for within a text (" the"); these may be part of a character.
  std::string_view id_to_bytes(int32_t id) const;
  // Whether the id is an added token flagged special.
  bool is_special(int32_t id) const;

  // From tokenizer_config.json; nothing where it is absent or names none.
  std::optional<int32_t> bos_id() const;
  std::optional<int32_t> eos_id() const;
  std::optional<int32_t> pad_id() const;

  // The Jinja source of chat_template.jinja or else of tokenizer_config.json; null where there is
  // none. `name` picks from a config's list of templates ("default", "tool_use").
  const std::string* chat_template(std::string_view name = "default") const;

 private:
  friend class IncrementalDecoder;
  struct Data;
  explicit Tokenizer(std::shared_ptr<const Data> data);
  std::shared_ptr<const Data> data_;
};

// Turns ids into text as they come, holding back the bytes of a character that is not complete.
// All that push() returned, followed by finish(), equals Tokenizer::decode of the same ids.
class IncrementalDecoder {
 public:
  explicit IncrementalDecoder(Tokenizer tokenizer, const DecodeOptions& options = {});

  std::string push(int32_t id);
  // The rest, with U+FFFD for an incomplete character; the decoder is then as new.
  std::string finish();

 private:
  std::string take_byte_run();
  std::string strip(std::string text);

  Tokenizer tokenizer_;
  DecodeOptions options_;
  std::string pending_;  // bytes not yet given out
  bool at_start_ = true;
};

// The text of a tokenizer.json for a small closed alphabet: byte-level BPE without merges, one
// token per ASCII character in the given order (ids 0, 1, …), then the special tokens. For models
// that Octet initialises itself. Any other character cannot be encoded.
std::string make_character_tokenizer(std::string_view characters,
                                     std::span<const std::string> special_tokens);

}  // namespace octet::text
