// Added tokens: texts that are found before anything else is done, such as <|im_start|>.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace octet::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // looked for in the normalised text instead of the raw one
  bool single_word = false;  // only where no letter, digit or underscore touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
};

// Finds a set of added tokens in text, the leftmost first and of those the longest.
class AddedTokenFinder {
 public:
  // Looks for `content`, which may be the token's own or its normalised form; it must not be empty.
  void add(const AddedToken& token, std::string_view content);

  // Hands out the text in order: on_text for what lies between tokens (never empty), on_token for a
  // token. Specials are passed over, as text, unless `parse_special`.
  void split(std::string_view text, bool parse_special,
             const std::function<void(std::string_view)>& on_text,
             const std::function<void(int32_t)>& on_token) const;

 private:
  // The longest token that begins at `begin`, and its end; null where there is none.
  const AddedToken* longest_at(std::string_view text, size_t begin, size_t* end) const;

  // A trie: (node << 8 | byte) gives the next node; node 0 is the root.
  std::unordered_map<uint64_t, uint32_t> next_;
  std::vector<int32_t> token_at_node_ = {-1};  // index into tokens_, or -1
  std::vector<AddedToken> tokens_;
  bool starts_[256] = {};  // the bytes that some token begins with
};

}  // namespace octet::text
