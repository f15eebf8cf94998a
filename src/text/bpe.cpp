#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <unordered_set>

#include <fmt/format.h>

#include "base/error.h"
#include "text/utf8.h"

namespace octet::text {
namespace {

bool flag(const JsonNode& node, std::string_view key) {
  const auto value = node.find(key);
  return value && value->boolean();
}

}  // namespace

Bpe Bpe::from_json(const JsonNode& node) {
  // Files older than tokenizers 0.9 leave the type out.
  if (const auto type = node.find("type"); type && type->string() != "BPE") {
    type->fail_must("\"BPE\", the only model that is read");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto affix = node.find(key);
    if (affix && !affix->string().empty()) affix->fail_must("empty, as nothing else is supported");
  }
  if (const auto dropout = node.find("dropout")) {
    dropout->fail_must("null, as encoding must not be random");
  }
  Bpe bpe;
  bpe.fuse_unknown_ = flag(node, "fuse_unk");
  bpe.byte_fallback_ = flag(node, "byte_fallback");
  bpe.ignore_merges_ = flag(node, "ignore_merges");
  bpe.read_vocabulary(node.at("vocab"));
  bpe.read_merges(node.at("merges"));
  if (const auto unknown = node.find("unk_token"); unknown && !unknown->string().empty()) {
    bpe.unknown_id_ = bpe.find(unknown->string());
    if (bpe.unknown_id_ < 0) unknown->fail_must("a token of the vocabulary");
  }
  for (char32_t c = 0; c < bpe.character_ids_.size(); ++c) {
    std::string character;
    append_utf8(character, c);
    bpe.character_ids_[c] = bpe.find(character);
  }
  for (int byte = 0; byte < 256; ++byte) {
    bpe.byte_ids_[byte] = bpe.find(fmt::format("<0x{:02X}>", byte));
  }
  return bpe;
}

void Bpe::read_vocabulary(const JsonNode& node) {
  std::vector<bool> taken;
  vocabulary_.reserve(node.member_count());
  node.for_each_member([&](const std::string& token, const JsonNode& value) {
    const auto id = static_cast<int32_t>(value.integer(0, kMaxTokens - 1));
    if (taken.size() <= static_cast<size_t>(id)) taken.resize(id + 1);
    if (taken[id]) value.fail_must("an id that no other token has");
    taken[id] = true;
    vocabulary_.emplace(token, id);
  });
}

void Bpe::read_merges(const JsonNode& node) {
  merges_.resize(std::bit_ceil(2 * node.size() + 1));
  uint32_t rank = 0;
  std::string joined;
  node.for_each_element([&](const JsonNode& entry) {
    std::string_view left, right;
    if (entry.is_string()) {
      const std::string_view both = entry.string();
      const size_t space = both.find(' ');
      if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos) {
        entry.fail_must("two tokens with one space between them");
      }
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else {
      if (entry.size() != 2) entry.fail_must("a pair of tokens");
      left = entry.element(0).string();
      right = entry.element(1).string();
    }
    joined.assign(left).append(right);
    const int32_t left_id = find(left), right_id = find(right), id = find(joined);
    if (left_id < 0 || right_id < 0 || id < 0) {
      entry.fail_must("a pair of tokens of the vocabulary whose joint text is one as well");
    }
    add_merge({pair_of(left_id, right_id), rank++, id});
  });
}

void Bpe::add_merge(const Merge& merge) {
  const size_t mask = merges_.size() - 1;
  size_t slot = (merge.pair * 0x9E3779B97F4A7C15u >> 20) & mask;
  while (merges_[slot].pair != kNoPair && merges_[slot].pair != merge.pair)
    slot = (slot + 1) & mask;
  merges_[slot] = merge;  // of equal pairs the last counts, as in Hugging Face's map
}

const Bpe::Merge* Bpe::find_merge(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t mask = merges_.size() - 1;
  size_t slot = (pair * 0x9E3779B97F4A7C15u >> 20) & mask;
  while (merges_[slot].pair != pair) {
    if (merges_[slot].pair == kNoPair) return nullptr;
    slot = (slot + 1) & mask;
  }
  return &merges_[slot];
}

int32_t Bpe::find(std::string_view token) const {
  const auto entry = vocabulary_.find(std::string(token));
  return entry == vocabulary_.end() ? -1 : entry->second;
}

void Bpe::append_characters(std::string_view word, Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  const auto append = [&](int32_t id) { symbols.push_back({id, 0, 0}); };
  bool unknown_before = false;
  for (size_t i = 0; i < word.size();) {
    const CodePoint next = code_point_at(word, i);
    const std::string_view character = word.substr(i, next.length);
    i += next.length;
    const int32_t id =
        next.value < character_ids_.size() ? character_ids_[next.value] : find(character);
    if (id >= 0) {
      append(id);
      unknown_before = false;
      continue;
    }
    if (byte_fallback_ && std::all_of(character.begin(), character.end(), [&](char byte) {
          return byte_ids_[static_cast<uint8_t>(byte)] >= 0;
        })) {
      for (const char byte : character) append(byte_ids_[static_cast<uint8_t>(byte)]);
      unknown_before = false;
      continue;
    }
    if (unknown_id_ < 0) throw MissingCharacter{std::string(character)};
    if (!fuse_unknown_ || !unknown_before) append(unknown_id_);
    unknown_before = true;
  }
  for (size_t i = 0; i < symbols.size(); ++i) {
    symbols[i].previous = static_cast<int32_t>(i) - 1;
    symbols[i].next = i + 1 < symbols.size() ? static_cast<int32_t>(i) + 1 : -1;
  }
}

void Bpe::push_candidate(Scratch& scratch, int32_t left_place) const {
  if (left_place < 0) return;
  const auto& left = scratch.symbols[left_place];
  if (left.next < 0) return;
  if (const Merge* merge = find_merge(left.id, scratch.symbols[left.next].id)) {
    scratch.heap.push_back({merge->rank, left_place, merge->id});
    std::push_heap(scratch.heap.begin(), scratch.heap.end(), std::greater<>());
  }
}

void Bpe::encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    if (const int32_t id = find(word); id >= 0) return ids.push_back(id);
  }
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  append_characters(word, scratch);
  for (size_t i = 0; i < symbols.size(); ++i) push_candidate(scratch, static_cast<int32_t>(i));
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    auto& left = symbols[best.place];
    if (left.id < 0 || left.next < 0) continue;
    auto& right = symbols[left.next];
    // A candidate is stale once either of its symbols has been joined to another.
    const Merge* merge = find_merge(left.id, right.id);
    if (merge == nullptr || merge->id != best.id) continue;
    left.id = best.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = best.place;
    push_candidate(scratch, left.previous);
    push_candidate(scratch, best.place);
  }
  for (int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = symbols[i].next) {
    ids.push_back(symbols[i].id);
  }
}

}  // namespace octet::text
