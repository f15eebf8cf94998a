// Byte-pair encoding of one word: starting from its characters, the neighbours whose merge comes
// first in the list of merges are joined until none can be (of equal ones the leftmost first).
// Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/json_node.h"

namespace octet::text {

// Ids lie below this; a file with higher ones is taken for broken.
constexpr int64_t kMaxTokens = 1 << 22;

// Thrown by encode_word for a character without token, byte tokens or unknown token.
struct MissingCharacter {
  std::string character;
};

class Bpe {
 public:
  // From "model" of a tokenizer.json.
  static Bpe from_json(const JsonNode& node);

  // Buffers that one caller reuses from word to word.
  class Scratch {
   private:
    friend class Bpe;
    struct Symbol {
      int32_t id, previous, next;  // places of the neighbours, or -1; id -1: joined to another
    };
    struct Candidate {
      uint32_t rank;
      int32_t place, id;  // the left symbol's place, and the joined token
      bool operator>(const Candidate& other) const {
        return rank != other.rank ? rank > other.rank : place > other.place;
      }
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // Appends the ids of the word.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  const std::unordered_map<std::string, int32_t>& vocabulary() const { return vocabulary_; }

 private:
  struct Merge {
    uint64_t pair = kNoPair;  // left << 32 | right
    uint32_t rank = 0;
    int32_t id = 0;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static uint64_t pair_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  void read_vocabulary(const JsonNode& node);
  void read_merges(const JsonNode& node);
  void add_merge(const Merge& merge);
  const Merge* find_merge(int32_t left, int32_t right) const;
  void append_characters(std::string_view word, Scratch& scratch) const;
  void push_candidate(Scratch& scratch, int32_t left_place) const;
  int32_t find(std::string_view token) const;  // the id, or -1

  std::unordered_map<std::string, int32_t> vocabulary_;
  // Open addressing with a power of two of slots, at most half of them taken.
  std::vector<Merge> merges_;
  std::array<int32_t, 512> character_ids_{};  // ids of the first code points, or -1
  std::array<int32_t, 256> byte_ids_{};       // ids of <0x00> to <0xFF>, or -1
  int32_t unknown_id_ = -1;
  bool fuse_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;  // a word that is a token as a whole is taken so
};

}  // namespace octet::text
