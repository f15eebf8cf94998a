// docs/configuration.md, from the table of keys.
#include <cmath>

#include <fmt/format.h>

#include "loop/config_keys.h"

namespace octet::loop {
namespace {

std::string type_text(const Key& key) {
  const char* kNames[] = {
      "bool", "integer", "number", "string", "list of strings", "list of numbers", "table"};
  const Limits& limits = key.limits;
  const std::string_view type = limits.is_bytes ? "size" : kNames[key.field.index()];
  if (!limits.choices.empty()) {
    std::vector<std::string> shown;
    for (const std::string& choice : limits.choices) {
      const bool is_bool = choice == "false" && !limits.when_true.empty();
      shown.push_back(fmt::format(fmt::runtime(is_bool ? "`{}`" : "`\"{}\"`"), choice));
    }
    if (!limits.when_true.empty()) shown.push_back("`true`");
    return fmt::format("{}: {}", type, fmt::join(shown, ", "));
  }
  if (!std::isfinite(limits.min) && !std::isfinite(limits.max)) return std::string(type);
  std::vector<std::string> bounds;
  if (std::isfinite(limits.min)) {
    bounds.push_back(fmt::format("{} {}", limits.above_min ? ">" : "≥", limits.min));
  }
  if (std::isfinite(limits.max)) {
    bounds.push_back(fmt::format("{} {}", limits.below_max ? "<" : "≤", limits.max));
  }
  return fmt::format("{} {}", type, fmt::join(bounds, ", "));
}

std::string default_text(const Key& key, TrainConfig& defaults) {
  if (key.default_text.empty()) return fmt::format("`{}`", print_value(key, defaults));
  return key.default_text;
}

constexpr const char* kIntroduction = R"(# Configuration

Generated from the program's own table of keys (`OCTET_WRITE_DOCS=1 config_test`); do not edit.

A config is a TOML file, read strictly: an unknown key, a wrong type, a value out of range or keys
that contradict each other end the program with exit code 2 and a message that says where. Any key
can be given on the command line as `section.key=value`, in TOML syntax; a bare word is a string, and
a single string will do for a list of one. Paths are relative to the folder the program runs in.
`octet doctor CONFIG.toml` prints the file fully resolved, as a run writes it to its `config.toml`.

The last column says whose name a key has: TRL's where it has one (Transformers' trainer arguments
included), vLLM's, PEFT's, Unsloth's or verl's, else Octet's own.
)";

constexpr const char* kTogether = R"(
## What keys mean together

- `precision.flow` says whether FP8 is used and where, `model.load_in_fp8` which granularity. A
  granularity with `flow = "bf16"`, or `false` with an FP8 flow, is an error.
- `fp8_lora` needs `[lora]`; `[lora]` goes with `bf16` and `fp8_lora`.
- `clip.mode = "calibrated"` needs RL in an FP8 flow. Its `epsilon` and `epsilon_high` are the bounds
  of the BF16 reference; `calibration_init` is where the FP8 bounds start.
- A step's samples must divide evenly into `train.mini_batches`.
- Exactly one of `model.path` and `[model.init]`, and of `data.train` and `data.task`, is given.
)";

}  // namespace

std::string configuration_page() {
  TrainConfig defaults;
  for (const Section& section : config_sections()) make_section(defaults, section.name);
  std::string page = kIntroduction;
  for (const Section& section : config_sections()) {
    page += fmt::format("\n## [{}]\n\n{}\n", section.name, section.meaning);
    bool first = true;
    for (const Key& key : config_keys()) {
      if (section_of(key.name) != section.name) continue;
      if (first) page += "\n| key | type | default | meaning | name |\n|---|---|---|---|---|\n";
      first = false;
      page += fmt::format("| `{}` | {} | {} | {} | {} |\n", bare_name(key.name), type_text(key),
                          default_text(key, defaults), key.meaning, key.owner);
    }
  }
  page += kTogether;
  page += "\n## Not in this version\n\nThese are known and refused:\n\n";
  for (const Unavailable& entry : unavailable_keys()) {
    page += entry.value.empty() ? fmt::format("- `{}`\n", entry.name)
                                : fmt::format("- `{} = \"{}\"`\n", entry.name, entry.value);
  }
  page +=
      "\n## Names from elsewhere\n\nTyping one of these gives an error with Octet's name.\n\n"
      "| there | name there | here | note |\n|---|---|---|---|\n";
  for (const Alias& alias : config_aliases()) {
    const std::string here = alias.name.empty() ? "–" : fmt::format("`{}`", alias.name);
    page += fmt::format("| {} | `{}` | {} | {} |\n", alias.owner, alias.theirs, here, alias.note);
  }
  return page;
}

}  // namespace octet::loop
