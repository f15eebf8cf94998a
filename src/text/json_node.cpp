#include "text/json_node.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet::text {

struct JsonNode::Document {
  std::string where;
  Value root;
};

JsonNode::JsonNode(std::shared_ptr<const Document> document, const Value* value)
    : document_(std::move(document)), value_(value) {}

JsonNode JsonNode::child(const Value* value, const std::string* key, size_t index) const {
  JsonNode node(document_, value);
  node.parent_name_ = name();
  node.key_ = key;
  node.index_ = index;
  node.is_root_ = false;
  return node;
}

JsonNode JsonNode::parse(std::string_view text, std::string_view where) {
  auto document = std::make_shared<Document>();
  document->where = where;
  try {
    document->root = Value::parse(text);
  } catch (const nlohmann::json::exception& error) {
    std::string reason = error.what();
    if (const size_t end = reason.find("] "); end != std::string::npos) reason.erase(0, end + 2);
    fail(where, "valid JSON is required, but: {}", reason);
  }
  const Value* root = &document->root;
  return JsonNode(std::move(document), root);
}

JsonNode JsonNode::at(std::string_view key) const {
  std::optional<JsonNode> member = find(key);
  if (!member) {
    fail(where(), "\"{}{}{}\" must be given, but is not there; is the file complete?", name(),
         is_root_ ? "" : ".", key);
  }
  return *std::move(member);
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  if (!is_object()) fail_must("an object");
  const auto member = value_->find(key);
  if (member == value_->end() || member->is_null()) return std::nullopt;
  return child(&*member, &member.key(), 0);
}

bool JsonNode::is_string() const { return value_->is_string(); }
bool JsonNode::is_object() const { return value_->is_object(); }
bool JsonNode::is_array() const { return value_->is_array(); }

const std::string& JsonNode::string() const {
  if (!is_string()) fail_must("a string");
  return value_->get_ref<const std::string&>();
}

int64_t JsonNode::integer(int64_t low, int64_t high) const {
  const bool fits = value_->is_number_unsigned()
                        ? value_->get<uint64_t>() <= static_cast<uint64_t>(high) &&
                              std::cmp_greater_equal(value_->get<uint64_t>(), low)
                        : value_->is_number_integer() && value_->get<int64_t>() >= low &&
                              value_->get<int64_t>() <= high;
  if (!fits) fail_must(fmt::format("an integer from {} to {}", low, high));
  return value_->get<int64_t>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) fail_must("true or false");
  return value_->get<bool>();
}

size_t JsonNode::size() const {
  if (!is_array()) fail_must("a list");
  return value_->size();
}

size_t JsonNode::member_count() const {
  if (!is_object()) fail_must("an object");
  return value_->size();
}

JsonNode JsonNode::element(size_t index) const {
  if (index >= size()) fail_must(fmt::format("a list of more than {} elements", index));
  return child(&(*value_)[index], nullptr, index);
}

void JsonNode::for_each_element(const std::function<void(const JsonNode&)>& visit) const {
  if (size() == 0) return;
  JsonNode node = element(0);
  for (size_t i = 0; i < value_->size(); ++i) {
    node.value_ = &(*value_)[i];
    node.index_ = i;
    visit(node);
  }
}

void JsonNode::for_each_member(
    const std::function<void(const std::string&, const JsonNode&)>& visit) const {
  if (!is_object()) fail_must("an object");
  JsonNode node = child(nullptr, nullptr, 0);
  for (auto member = value_->begin(); member != value_->end(); ++member) {
    node.value_ = &*member;
    node.key_ = &member.key();
    visit(member.key(), node);
  }
}

std::string JsonNode::name() const {
  if (is_root_) return "";
  if (key_ == nullptr) return fmt::format("{}[{}]", parent_name_, index_);
  return parent_name_.empty() ? *key_ : fmt::format("{}.{}", parent_name_, *key_);
}
const std::string& JsonNode::where() const { return document_->where; }

void JsonNode::fail_must(std::string_view requirement) const {
  std::string given = value_->dump(-1, ' ', false, Value::error_handler_t::replace);
  if (given.size() > 80) given = given.substr(0, 80) + "…";
  fail(where(), "\"{}\" must be {}, but is {}", is_root_ ? "the document" : name(), requirement,
       given);
}

}  // namespace octet::text
