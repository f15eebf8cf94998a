// The one table of configuration keys. The reader, the printer and docs/configuration.md all walk
// it, so they cannot drift apart. Only the config's own sources and tests include this.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "loop/config.h"

namespace octet::loop {

// Where a key's value lives. The optional section must be there.
using Field =
    std::variant<bool& (*)(TrainConfig&), int64_t& (*)(TrainConfig&), double& (*)(TrainConfig&),
                 std::string& (*)(TrainConfig&), std::vector<std::string>& (*)(TrainConfig&),
                 std::vector<double>& (*)(TrainConfig&), JsonObject& (*)(TrainConfig&)>;

// The values a key takes, beyond its type.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;                 // min itself is not allowed
  bool below_max = false;                 // max itself is not allowed
  std::vector<std::string> choices = {};  // of a string, or of each string in a list; empty: any
  std::string when_true = {};  // what TOML's true means for a string key; empty: not allowed
  bool is_bytes = false;       // an integer that may be written "5GiB"
};

struct Key {
  std::string name;  // "section.key"
  Field field;
  std::string owner;  // whose name it is
  std::string meaning;
  Limits limits = {};
  std::string default_text =
      {};  // for a default that depends on other keys; empty: the struct's own
};

struct Section {
  std::string name;  // "model.init" stands inside model
  std::string meaning;
};

// A known key (value empty) or a known value of a key that this version does not do.
struct Unavailable {
  std::string name;  // "section.key"; "section.*" for all keys of a section
  std::string value;
};

// How another program calls what Octet calls `name`.
struct Alias {
  std::string theirs;  // as typed there, with or without a section
  std::string owner;
  std::string name;  // Octet's "section.key", or "" where there is no such key
  std::string note;  // what differs; may be empty
};

const std::vector<Section>& config_sections();
const std::vector<Key>& config_keys();
const std::vector<Unavailable>& unavailable_keys();
const std::vector<Alias>& config_aliases();

std::string section_of(std::string_view name);  // "model.init.seed" → "model.init"
std::string bare_name(std::string_view name);   // "model.init.seed" → "seed"
const Key* find_key(std::string_view name);
bool is_section(std::string_view name);

// Creates the optional section that `section` names, if it is one; `has_section` is false only for
// an optional one that is not there.
void make_section(TrainConfig& config, std::string_view section);
bool has_section(const TrainConfig& config, std::string_view section);

// A value in TOML syntax, as the printer and the documentation show it.
std::string print_value(const Key& key, TrainConfig& config);

// Where each given key was given ("file:line" or the override), by "section.key".
using GivenKeys = std::map<std::string, std::string, std::less<>>;

// Fills in what depends on other keys and checks what keys mean together.
void resolve_config(TrainConfig& config, const GivenKeys& given, std::string_view where);

}  // namespace octet::loop
