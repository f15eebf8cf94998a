// A place in a parsed tokenizer.json that knows its own name, so that a wrong type is an error
// which names the file and the key.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace octet::text {

class JsonNode {
 public:
  // Parses a whole document. Unlike base/json.h it takes large objects in linear time and does not
  // keep the order of keys.
  static JsonNode parse(std::string_view text, std::string_view where);

  // A member; it must be there. find() takes a missing one and null as nothing.
  JsonNode at(std::string_view key) const;
  std::optional<JsonNode> find(std::string_view key) const;

  bool is_string() const;
  bool is_object() const;
  bool is_array() const;

  // The value; another type is an error. The string lives as long as any node of the document.
  const std::string& string() const;
  int64_t integer(int64_t low, int64_t high) const;  // within [low, high]
  bool boolean() const;

  size_t size() const;          // of an array
  size_t member_count() const;  // of an object
  JsonNode element(size_t index) const;
  void for_each_element(const std::function<void(const JsonNode&)>& visit) const;
  void for_each_member(
      const std::function<void(const std::string& key, const JsonNode& value)>& visit) const;

  std::string name() const;  // "model.merges[3]"
  const std::string& where() const;
  // Throws "[where] "name" must be …, but is …".
  [[noreturn]] void fail_must(std::string_view requirement) const;

 private:
  struct Document;
  using Value = nlohmann::json;
  JsonNode(std::shared_ptr<const Document> document, const Value* value);
  // A member (by its key in the document) or an element of this node. The name is put together only
  // when an error asks for it: there are hundreds of thousands of tokens.
  JsonNode child(const Value* value, const std::string* key, size_t index) const;

  std::shared_ptr<const Document> document_;
  const Value* value_;
  std::string parent_name_ = {};
  const std::string* key_ = nullptr;  // null: an element, or the root
  size_t index_ = 0;
  bool is_root_ = true;
};

}  // namespace octet::text
