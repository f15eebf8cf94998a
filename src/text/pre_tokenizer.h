// The pre-tokenizer of a tokenizer.json: splits text into the words that BPE works on.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "text/json_node.h"
#include "text/regex.h"

namespace octet::text {

// Split, Digits, ByteLevel and sequences of them; none gives the whole text as one word.
class PreTokenizer {
 public:
  using Sink = std::function<void(std::string_view)>;

  static PreTokenizer from_json(const std::optional<JsonNode>& node);

  // Hands the words to `sink` in order, none empty. The text must be valid UTF-8; the views last
  // only until `sink` returns.
  void split(std::string_view text, const Sink& sink) const { run(0, text, sink); }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Stage {
    enum class Kind { kPrefixSpace, kSplit, kByteAlphabet } kind;
    std::optional<Regex> pattern = {};
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };

  void add(const JsonNode& node);
  void run(size_t stage, std::string_view text, const Sink& sink) const;
  static void split(const Stage& stage, std::string_view text, const Sink& sink);

  std::vector<Stage> stages_;
};

}  // namespace octet::text
