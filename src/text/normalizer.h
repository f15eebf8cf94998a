// The normalizer of a tokenizer.json: what happens to text before it is split into words.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_node.h"
#include "text/regex.h"

namespace octet::text {

// NFC, NFD, NFKC, NFKD, Prepend, Replace and sequences of them; none leaves the text as it is.
class Normalizer {
 public:
  static Normalizer from_json(const std::optional<JsonNode>& node);

  // The text must be valid UTF-8.
  std::string apply(std::string text) const;
  bool empty() const { return steps_.empty(); }

 private:
  struct Step {
    enum class Kind { kUnicode, kPrepend, kReplace } kind;
    int unicode_options = 0;   // utf8proc's, for kUnicode
    std::string content = {};  // what is prepended or put in place
    std::optional<Regex> pattern = {};
  };
  void add(const JsonNode& node);
  std::vector<Step> steps_;
};

// The Regex of a {"Regex": …} or {"String": …} object.
Regex pattern_from_json(const JsonNode& node);

// Puts `content` in the place of each match.
std::string replace_all(std::string_view text, const Regex& pattern, std::string_view content);

}  // namespace octet::text
