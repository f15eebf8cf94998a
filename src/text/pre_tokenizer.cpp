#include "text/pre_tokenizer.h"

#include <string>

#include "text/byte_level.h"
#include "text/normalizer.h"

namespace octet::text {
namespace {

// GPT-2's words. Source: openai/gpt-2, encoder.py.
constexpr std::string_view kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

bool flag(const JsonNode& node, std::string_view key, bool fallback) {
  const auto value = node.find(key);
  return value ? value->boolean() : fallback;
}

}  // namespace

PreTokenizer PreTokenizer::from_json(const std::optional<JsonNode>& node) {
  PreTokenizer result;
  if (node) result.add(*node);
  return result;
}

void PreTokenizer::add(const JsonNode& node) {
  const auto regex = [&](std::string_view pattern) {
    return Regex(pattern, Regex::Syntax::kPattern, node.where());
  };
  const std::string type = node.at("type").string();
  if (type == "Sequence") {
    node.at("pretokenizers").for_each_element([&](const JsonNode& child) { add(child); });
  } else if (type == "Split") {
    const JsonNode behavior = node.at("behavior");
    const std::string& name = behavior.string();
    if (name != "Removed" && name != "Isolated" && name != "MergedWithPrevious" &&
        name != "MergedWithNext" && name != "Contiguous") {
      behavior.fail_must(
          "one of Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous");
    }
    stages_.push_back({Stage::Kind::kSplit, pattern_from_json(node.at("pattern")),
                       name == "Removed"              ? Behavior::kRemoved
                       : name == "Isolated"           ? Behavior::kIsolated
                       : name == "MergedWithPrevious" ? Behavior::kMergedWithPrevious
                       : name == "MergedWithNext"     ? Behavior::kMergedWithNext
                                                      : Behavior::kContiguous,
                       flag(node, "invert", false)});
  } else if (type == "Digits") {
    stages_.push_back({Stage::Kind::kSplit,
                       regex(flag(node, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)")});
  } else if (type == "ByteLevel") {
    if (flag(node, "add_prefix_space", true)) stages_.push_back({Stage::Kind::kPrefixSpace});
    if (flag(node, "use_regex", true)) {
      stages_.push_back({Stage::Kind::kSplit, regex(kGpt2Words)});
    }
    stages_.push_back({Stage::Kind::kByteAlphabet});
  } else {
    node.at("type").fail_must("a pre-tokenizer that is known (ByteLevel, Digits, Split, Sequence)");
  }
}

void PreTokenizer::run(size_t stage, std::string_view text, const Sink& sink) const {
  if (text.empty()) return;
  if (stage == stages_.size()) return sink(text);
  switch (stages_[stage].kind) {
    case Stage::Kind::kPrefixSpace:
      return text.front() == ' ' ? run(stage + 1, text, sink)
                                 : run(stage + 1, std::string(" ").append(text), sink);
    case Stage::Kind::kByteAlphabet:
      return run(stage + 1, bytes_to_alphabet(text), sink);
    case Stage::Kind::kSplit:
      return split(stages_[stage], text,
                   [&](std::string_view piece) { run(stage + 1, piece, sink); });
  }
}

void PreTokenizer::split(const Stage& stage, std::string_view text, const Sink& sink) {
  // A piece is held back in [held_begin, held_end) until it is known what joins it.
  size_t held_begin = 0, held_end = 0;
  bool held_match = false;
  const auto give = [&](size_t begin, size_t end, bool is_match) {
    if (begin == end) return;
    bool join = false;
    switch (stage.behavior) {
      case Behavior::kRemoved:
      case Behavior::kIsolated:
        break;
      case Behavior::kMergedWithPrevious:
        join = is_match && !held_match;
        break;
      case Behavior::kMergedWithNext:
        join = !is_match && held_match;
        break;
      case Behavior::kContiguous:
        join = is_match == held_match;
        break;
    }
    if (!join) {
      if (held_end > held_begin) sink(text.substr(held_begin, held_end - held_begin));
      held_begin = begin;
    }
    held_end = end;
    held_match = is_match;
    if (is_match && stage.behavior == Behavior::kRemoved) held_begin = held_end;
  };
  size_t done = 0;
  stage.pattern->for_each_match(text, [&](size_t begin, size_t end) {
    give(done, begin, stage.invert);
    give(begin, end, !stage.invert);
    done = end;
  });
  give(done, text.size(), stage.invert);
  if (held_end > held_begin) sink(text.substr(held_begin, held_end - held_begin));
}

}  // namespace octet::text
