#include "loop/config.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <toml++/toml.h>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "loop/config_keys.h"

namespace octet::loop {
namespace {

template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string print_double(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string print_json(const Json& value) {
  if (value.is_string()) return quoted(value.get<std::string>());
  if (value.is_number_float()) return print_double(value.get<double>());
  if (!value.is_structured()) return value.dump();
  std::vector<std::string> parts;
  for (const auto& [name, item] : value.items()) {
    parts.push_back(value.is_object() ? quoted(name) + " = " + print_json(item) : print_json(item));
  }
  return fmt::format(value.is_object() ? fmt::runtime("{{{}}}") : fmt::runtime("[{}]"),
                     fmt::join(parts, ", "));
}

const char* describe(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "an integer";
    case toml::node_type::floating_point:
      return "a number with a fraction";
    case toml::node_type::boolean:
      return "true or false";
    default:
      return "a date or time";
  }
}

Json to_json(const toml::node& node, std::string_view where) {
  if (const auto* table = node.as_table()) {
    Json object = Json::object();
    for (const auto& [name, item] : *table) object[std::string(name.str())] = to_json(item, where);
    return object;
  }
  if (const auto* array = node.as_array()) {
    Json list = Json::array();
    for (const auto& item : *array) list.push_back(to_json(item, where));
    return list;
  }
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return number->get();
  if (const auto* flag = node.as_boolean()) return flag->get();
  const auto* number = node.as_floating_point();
  if (number == nullptr || !std::isfinite(number->get())) {
    fail_usage(where, "a table here may hold text, finite numbers, true, false, lists and tables");
  }
  return number->get();
}

// Fills a TrainConfig from TOML nodes and remembers where each key came from.
class Reader {
 public:
  TrainConfig config;
  GivenKeys given;

  // `place` gives the "file:line" of a node.
  using Place = std::function<std::string(const toml::source_region&)>;

  void read_table(const toml::table& table, const std::string& section, const Place& place) {
    make_section(config, section);
    for (const auto& [key, node] : table) {
      const std::string name =
          section.empty() ? std::string(key) : section + "." + std::string(key);
      const std::string where = place(key.source());
      if (is_section(name)) {
        if (!node.is_table()) {
          fail_usage(where, "\"{}\" must be a section (a table), but is {}", name, describe(node));
        }
        read_table(*node.as_table(), name, place);
      } else {
        read_key(name, node, where);
      }
    }
  }

  void read_override(const std::string& text) {
    const std::string where = "command line: " + text;
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      fail_usage(where, "an override must look like section.key=value");
    }
    const std::string name(trim(std::string_view(text).substr(0, equals)));
    const std::string value(trim(std::string_view(text).substr(equals + 1)));
    if (!is_valid_utf8(text)) fail_usage(where, "an override must be valid UTF-8");
    toml::table parsed;
    std::string problem;
    try {
      parsed = toml::parse("value = " + value);
    } catch (const toml::parse_error& error) {
      problem = error.description();
    }
    const Key* key = find_key(name);
    const bool text_wanted =
        key != nullptr && std::holds_alternative<std::string& (*)(TrainConfig&)>(key->field);
    const bool number_wanted =
        key != nullptr && (std::holds_alternative<int64_t& (*)(TrainConfig&)>(key->field) ||
                           std::holds_alternative<double& (*)(TrainConfig&)>(key->field));
    if (number_wanted && !problem.empty() && !value.empty() &&
        value.find_first_not_of("+-0123456789") == std::string::npos) {
      fail_usage(where, "\"{}\" must be a number in TOML, of 64 bits where it is whole: {}", name,
                 problem);
    }
    const toml::node* node = parsed.size() == 1 ? parsed.get("value") : nullptr;
    // A bare word, and a path such as 2026 for a key that is text.
    const bool bare = node == nullptr || (text_wanted && !node->is_string() &&
                                          !(node->is_boolean() && !key->limits.when_true.empty()));
    if (bare) parsed = toml::table{{"value", value}};
    read_key(name, *parsed.get("value"), where);
  }

 private:
  void read_key(const std::string& name, const toml::node& node, const std::string& where) {
    refuse_unavailable(name, node, where);
    const Key* key = find_key(name);
    if (key == nullptr) fail_unknown(name, node, where);
    make_section(config, section_of(name));
    std::visit([&](auto field) { assign(*key, field(config), node, where); }, key->field);
    given.insert_or_assign(name, where);
  }

  static void refuse_unavailable(const std::string& name, const toml::node& node,
                                 const std::string& where) {
    const auto is_value = [&](const toml::node& item, const std::string& value) {
      if (const auto* text = item.as_string()) return text->get() == value;
      if (const auto* flag = item.as_boolean()) return value == (flag->get() ? "true" : "false");
      return false;
    };
    for (const Unavailable& entry : unavailable_keys()) {
      const bool whole_section = entry.name == section_of(name) + ".*";
      if (entry.name != name && !whole_section) continue;
      if (entry.value.empty()) fail_usage(where, "\"{}\" is not available in this version", name);
      bool hit = is_value(node, entry.value);
      if (const auto* list = node.as_array()) {
        hit = std::ranges::any_of(*list, [&](const auto& i) { return is_value(i, entry.value); });
      }
      if (hit) {
        fail_usage(where, "\"{}\" = \"{}\" is not available in this version", name, entry.value);
      }
    }
  }

  [[noreturn]] static void fail_unknown(const std::string& name, const toml::node& node,
                                        const std::string& where) {
    const std::string bare = bare_name(name);
    if (section_of(name).empty() && node.is_table()) {
      std::vector<std::string> sections;
      for (const Section& section : config_sections()) sections.push_back(section.name);
      const std::string near = nearest_name(name, sections);
      fail_usage(where, "[{}] is no known section{}; the sections are {}", name,
                 near.empty() ? "" : fmt::format(", did you mean [{}]?", near),
                 fmt::join(sections, ", "));
    }
    for (const Alias& alias : config_aliases()) {
      if (alias.theirs != name && alias.theirs != bare && !name.ends_with("." + alias.theirs))
        continue;
      if (alias.name.empty()) {
        fail_usage(where, "\"{}\" ({}) has no counterpart in Octet: {}; leave it out", name,
                   alias.owner, alias.note);
      }
      fail_usage(where, "\"{}\" is no known key; what {} calls \"{}\" is \"{}\" here{}", name,
                 alias.owner, alias.theirs, alias.name,
                 alias.note.empty() ? "" : " (" + alias.note + ")");
    }
    std::vector<std::string> siblings;
    std::vector<std::string> all;
    for (const Key& key : config_keys()) {
      all.push_back(key.name);
      if (section_of(key.name) == section_of(name)) siblings.push_back(key.name);
      if (bare_name(key.name) == bare) {
        fail_usage(where, "\"{}\" is no known key; did you mean \"{}\"?", name, key.name);
      }
    }
    std::string near = nearest_name(name, siblings);
    if (near.empty()) near = nearest_name(name, all);
    fail_usage(where, "\"{}\" is no known key{}; docs/configuration.md lists them all", name,
               near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
  }

  [[noreturn]] static void fail_type(const Key& key, const char* wanted, const toml::node& node,
                                     const std::string& where) {
    fail_usage(where, "\"{}\" must be {}, but is {}", key.name, wanted, describe(node));
  }

  static void check_range(const Key& key, double value, const std::string& where) {
    const Limits& limits = key.limits;
    const bool ok = std::isfinite(value) && value >= limits.min && value <= limits.max &&
                    !(limits.above_min && value == limits.min) &&
                    !(limits.below_max && value == limits.max);
    if (ok) return;
    std::string bounds = "finite";
    if (std::isfinite(limits.min)) {
      bounds = fmt::format("{} {}", limits.above_min ? "above" : "at least", limits.min);
    }
    if (std::isfinite(limits.max)) {
      bounds += fmt::format(" and {} {}", limits.below_max ? "below" : "at most", limits.max);
    }
    fail_usage(where, "\"{}\" must be {}, but is {}", key.name, bounds, value);
  }

  static void check_choice(const Key& key, const std::string& value, const std::string& where) {
    const auto& choices = key.limits.choices;
    if (choices.empty() || std::ranges::find(choices, value) != choices.end()) return;
    const std::string near = nearest_name(value, choices);
    fail_usage(where, "\"{}\" must be one of \"{}\", but is \"{}\"{}", key.name,
               fmt::join(choices, "\", \""), value,
               near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
  }

  static void assign(const Key& key, bool& target, const toml::node& node,
                     const std::string& where) {
    if (!node.is_boolean()) fail_type(key, "true or false", node, where);
    target = node.as_boolean()->get();
  }

  static void assign(const Key& key, int64_t& target, const toml::node& node,
                     const std::string& where) {
    if (node.is_string() && key.limits.is_bytes) {
      target = parse_bytes(node.as_string()->get(), where);
    } else if (node.is_integer()) {
      target = node.as_integer()->get();
    } else {
      fail_type(key, key.limits.is_bytes ? "a size such as \"5GiB\"" : "an integer", node, where);
    }
    check_range(key, static_cast<double>(target), where);
  }

  static void assign(const Key& key, double& target, const toml::node& node,
                     const std::string& where) {
    if (!node.is_number()) fail_type(key, "a number", node, where);
    target = node.is_integer() ? static_cast<double>(node.as_integer()->get())
                               : node.as_floating_point()->get();
    check_range(key, target, where);
    const auto used = std::fabs(static_cast<float>(target));
    if (target == 0 || (used >= FLT_MIN && used <= FLT_MAX)) return;
    fail_usage(where, "\"{}\" must be 0 or a number of float32 ({:.3g} to {:.3g}), but is {}",
               key.name, FLT_MIN, FLT_MAX, target);
  }

  static void assign(const Key& key, std::string& target, const toml::node& node,
                     const std::string& where) {
    if (node.is_boolean() && !key.limits.when_true.empty()) {
      target = node.as_boolean()->get() ? key.limits.when_true : "false";
    } else if (node.is_string()) {
      target = node.as_string()->get();
    } else {
      fail_type(key, "a string", node, where);
    }
    check_choice(key, target, where);
  }

  // A single string stands for a list of one.
  static void assign(const Key& key, std::vector<std::string>& target, const toml::node& node,
                     const std::string& where) {
    target.clear();
    const auto add = [&](const toml::node& item) {
      if (!item.is_string()) fail_type(key, "a list of strings", item, where);
      const std::string& text = item.as_string()->get();
      check_choice(key, text, where);
      if (text.empty()) fail_usage(where, "\"{}\" must hold texts, but one is empty", key.name);
      if (std::ranges::find(target, text) != target.end()) {
        fail_usage(where, "\"{}\" must hold different texts, but has \"{}\" twice", key.name, text);
      }
      target.push_back(text);
    };
    if (!node.is_array()) return add(node);
    for (const auto& item : *node.as_array()) add(item);
  }

  static void assign(const Key& key, std::vector<double>& target, const toml::node& node,
                     const std::string& where) {
    target.clear();
    if (!node.is_array()) fail_type(key, "a list of numbers", node, where);
    for (const auto& item : *node.as_array()) {
      assign(key, target.emplace_back(), item, where);
    }
  }

  static void assign(const Key& key, JsonObject& target, const toml::node& node,
                     const std::string& where) {
    if (!node.is_table()) fail_type(key, "a table", node, where);
    target.text = to_json(node, where).dump();
  }
};

}  // namespace

std::string print_value(const Key& key, TrainConfig& config) {
  const Overloaded printer{
      [](bool value) -> std::string { return value ? "true" : "false"; },
      [](int64_t value) { return std::to_string(value); },
      [](double value) { return print_double(value); },
      [&](const std::string& value) {
        return value == "false" && !key.limits.when_true.empty() ? value : quoted(value);
      },
      [](const std::vector<std::string>& list) { return print_json(list); },
      [](const std::vector<double>& list) { return print_json(list); },
      [](const JsonObject& object) { return print_json(parse_json(object.text, "config")); },
  };
  return std::visit([&](auto field) { return printer(field(config)); }, key.field);
}

TrainConfig parse_config(std::string_view text, std::string_view where,
                         std::span<const std::string> overrides) {
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail_usage(fmt::format("{}:{}", where, error.source().begin.line), "valid TOML is required: {}",
               error.description());
  }
  Reader reader;
  reader.read_table(table, "", [&](const toml::source_region& source) {
    return fmt::format("{}:{}", where, source.begin.line);
  });
  for (const std::string& entry : overrides) reader.read_override(entry);
  resolve_config(reader.config, reader.given, where);
  return std::move(reader.config);
}

TrainConfig read_config(const std::string& path, std::span<const std::string> overrides) {
  if (!std::filesystem::is_regular_file(path)) {
    fail_usage(path, "a config must be a TOML file, but there is none at this path");
  }
  return parse_config(read_file(path), path, overrides);
}

std::string print_config(const TrainConfig& config) {
  TrainConfig copy = config;
  std::string out;
  for (const Section& section : config_sections()) {
    if (!has_section(copy, section.name)) continue;
    std::string lines;
    for (const Key& key : config_keys()) {
      if (section_of(key.name) != section.name) continue;
      lines += fmt::format("{} = {}\n", bare_name(key.name), print_value(key, copy));
    }
    if (!lines.empty())
      out += fmt::format("{}[{}]\n{}", out.empty() ? "" : "\n", section.name, lines);
  }
  return out;
}

}  // namespace octet::loop
