#include "text/added_tokens.h"

#include <algorithm>

#include "text/utf8.h"

namespace octet::text {
namespace {

bool word_touches(std::string_view text, size_t begin, size_t end) {
  return (begin > 0 && is_word_character(code_point_before(text, begin).value)) ||
         (end < text.size() && is_word_character(code_point_at(text, end).value));
}

size_t spaces_begin(std::string_view text, size_t floor, size_t end) {
  while (end > floor) {
    const CodePoint last = code_point_before(text, end);
    if (!is_space(last.value)) break;
    end -= last.length;
  }
  return end;
}

size_t spaces_end(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    const CodePoint next = code_point_at(text, begin);
    if (!is_space(next.value)) break;
    begin += next.length;
  }
  return begin;
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token, std::string_view content) {
  uint32_t node = 0;
  for (const char c : content) {
    const uint64_t key = uint64_t{node} << 8 | static_cast<uint8_t>(c);
    const auto [edge, is_new] =
        next_.try_emplace(key, static_cast<uint32_t>(token_at_node_.size()));
    if (is_new) token_at_node_.push_back(-1);
    node = edge->second;
  }
  // Of two tokens with one content the first counts.
  if (token_at_node_[node] < 0) token_at_node_[node] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
  starts_[static_cast<uint8_t>(content.front())] = true;
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view text, size_t begin,
                                               size_t* end) const {
  const AddedToken* longest = nullptr;
  uint32_t node = 0;
  for (size_t i = begin; i < text.size(); ++i) {
    const auto edge = next_.find(uint64_t{node} << 8 | static_cast<uint8_t>(text[i]));
    if (edge == next_.end()) break;
    node = edge->second;
    if (token_at_node_[node] >= 0) {
      longest = &tokens_[token_at_node_[node]];
      *end = i + 1;
    }
  }
  return longest;
}

void AddedTokenFinder::split(std::string_view text, bool parse_special,
                             const std::function<void(std::string_view)>& on_text,
                             const std::function<void(int32_t)>& on_token) const {
  size_t done = 0;  // handed out up to here
  for (size_t i = 0; i < text.size();) {
    size_t end = 0;
    const AddedToken* token =
        starts_[static_cast<uint8_t>(text[i])] ? longest_at(text, i, &end) : nullptr;
    if (token == nullptr) {
      ++i;
      continue;
    }
    size_t begin = i;
    i = end;
    if ((token->special && !parse_special) || begin < done ||
        (token->single_word && word_touches(text, begin, end))) {
      continue;
    }
    if (token->lstrip) begin = spaces_begin(text, done, begin);
    if (token->rstrip) end = spaces_end(text, end);
    if (begin > done) on_text(text.substr(done, begin - done));
    on_token(token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace octet::text
