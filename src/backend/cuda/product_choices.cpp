#include "backend/cuda/product_choices.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

namespace fs = std::filesystem;

// Counts up when own kernels or what a search compares change.
constexpr int kRevision = 3;
constexpr const char* kPrefix = "products-";
constexpr std::array<const char*, 3> kFormats = {"bf16", "scaled", "blocks"};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path cache_folder() {
  if (const std::string folder = variable("OCTET_CACHE"); !folder.empty()) return folder;
  if (const std::string folder = variable("XDG_CACHE_HOME"); !folder.empty()) {
    return fs::path(folder) / "octet";
  }
  return fs::path(variable("HOME")) / ".cache" / "octet";
}

// "products-nvidia-h200-13.1.0.json"
std::string file_name(const std::string& device, const std::string& library_version) {
  std::string name = kPrefix;
  for (const char c : device + "-" + library_version) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.';
    name += plain ? c : c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : '-';
  }
  return name + ".json";
}

// Where files that come with the program may lie.
std::array<fs::path, 3> shipped_folders() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  return {program / "share/products", program.parent_path() / "share/octet/products",
          fs::path(OCTET_SHARE_DIR) / "products"};
}
std::string shipped_path(const std::string& name) {
  std::error_code ignored;
  for (const fs::path& folder : shipped_folders()) {
    if (const fs::path path = folder / name; fs::exists(path, ignored)) return path;
  }
  return "";
}

// The files of choices in a folder, in the order of their names.
std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(".json")) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

Json choice_to_json(const ProductKey& key, const ProductChoice& choice) {
  Json json = {{"format", kFormats[static_cast<size_t>(key.format)]},
               {"output", key.y_is_bf16 ? "bf16" : "f32"},
               {"rows", key.rows},
               {"depth", key.depth},
               {"tokens", key.tokens},
               {"kernel", choice.description}};
  if (choice.library) {
    std::string words;
    for (const uint64_t word : choice.algorithm) words += fmt::format("{:016x}", word);
    json["algorithm"] = words;
  }
  const auto tenths = [](double value) { return std::round(10 * value) / 10; };
  json["us"] = {tenths(choice.microseconds), tenths(choice.own_microseconds),
                tenths(choice.heuristic_microseconds)};
  return json;
}

std::pair<ProductKey, ProductChoice> choice_from_json(const Json& json) {
  const auto format = std::ranges::find(kFormats, json.at("format").get<std::string>());
  if (format == kFormats.end()) fail("format", "must be bf16, scaled or blocks");
  ProductKey key{static_cast<ProductFormat>(format - kFormats.begin()),
                 json.at("output").get<std::string>() == "bf16", json.at("rows").get<int64_t>(),
                 json.at("depth").get<int64_t>(), json.at("tokens").get<int64_t>()};
  ProductChoice choice;
  choice.description = json.at("kernel").get<std::string>();
  if (json.contains("algorithm")) {
    const auto words = json.at("algorithm").get<std::string>();
    if (words.size() != 128) fail("algorithm", "must have 128 digits, but has {}", words.size());
    for (size_t i = 0; i < choice.algorithm.size(); ++i) {
      choice.algorithm[i] = std::stoull(words.substr(16 * i, 16), nullptr, 16);
    }
    choice.library = true;
  }
  choice.microseconds = json.at("us").at(0).get<double>();
  choice.own_microseconds = json.at("us").at(1).get<double>();
  choice.heuristic_microseconds = json.at("us").at(2).get<double>();
  return {key, choice};
}

std::string describe(const ProductKey& key, const ProductChoice& choice) {
  return fmt::format("{}: {:.1f} us by {} (own kernel {:.1f}{})", key.to_string(),
                     choice.microseconds, choice.description, choice.own_microseconds,
                     choice.heuristic_microseconds > 0
                         ? fmt::format(", heuristic {:.1f}", choice.heuristic_microseconds)
                         : "");
}

}  // namespace

std::string ProductKey::to_string() const {
  const int64_t begin = bucket_begin(tokens);
  return fmt::format(
      "{}{} {} x {}, {} token{}", kFormats[static_cast<size_t>(format)], y_is_bf16 ? "" : " to f32",
      rows, depth,
      begin == tokens ? fmt::format("{}", tokens) : fmt::format("{}-{}", begin, tokens),
      tokens == 1 ? "" : "s");
}

int64_t token_bucket(int64_t num_tokens) {
  if (num_tokens <= 1) return 1;
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(num_tokens, 8))));
}

int64_t bucket_begin(int64_t bucket) { return bucket <= 1 ? 1 : bucket == 8 ? 2 : bucket / 2 + 1; }

ProductChoices::ProductChoices(std::string device, std::string library_version)
    : device_(std::move(device)), library_version_(std::move(library_version)) {
  const std::string name = file_name(device_, library_version_);
  path_ = (cache_folder() / name).string();
  found_ = read(path_);
  shipped_ = read(shipped_path(name));
}

const ProductChoice* ProductChoices::find(const ProductKey& key) const {
  for (const Map* map : {&found_, &shipped_}) {
    if (const auto found = map->find(key); found != map->end()) return &found->second;
  }
  return nullptr;
}

void ProductChoices::add(const ProductKey& key, const ProductChoice& choice) {
  found_[key] = choice;
  try {
    fs::create_directories(fs::path(path_).parent_path());
    Map all = read(path_);  // others may have added to it
    all.insert(found_.begin(), found_.end());
    all[key] = choice;
    write_file_atomically(path_, to_text(all));
  } catch (const std::exception& error) {
    if (!warned_) log_warning("choices of kernels are not kept: {}", error.what());
    warned_ = true;
  }
}

std::string ProductChoices::to_text() const {
  Map all = found_;
  all.insert(shipped_.begin(), shipped_.end());
  return to_text(all);
}

// A line for each product.
std::string ProductChoices::to_text(const Map& choices) const {
  std::vector<std::string> lines;
  for (const auto& [key, choice] : choices) lines.push_back(choice_to_json(key, choice).dump());
  return fmt::format(
      "{{\"revision\": {}, \"device\": {}, \"cublaslt\": {}, \"products\": [\n{}\n]}}\n", kRevision,
      Json(device_).dump(), Json(library_version_).dump(), fmt::join(lines, ",\n"));
}

ProductChoices::Map ProductChoices::read(const std::string& path) const {
  Map choices;
  std::error_code ignored;
  if (path.empty() || !fs::exists(path, ignored)) return choices;
  try {
    const Json json = read_json_file(path);
    if (json.at("revision") != kRevision || json.at("device") != device_ ||
        json.at("cublaslt") != library_version_) {
      log_warning("{} is passed over: it is of another build, device or library", path);
      return choices;
    }
    for (const Json& product : json.at("products")) choices.insert(choice_from_json(product));
  } catch (const std::exception& error) {
    log_warning("{} is passed over: {}", path, error.what());
    choices.clear();
  }
  return choices;
}

std::string describe_product_choices() {
  std::string text;
  const auto describe_file = [&](const fs::path& path, const char* what, bool each) {
    try {
      const Json json = read_json_file(path.string());
      if (json.at("revision") != kRevision) {
        text +=
            fmt::format("products:         {} is passed over: of another build\n", path.string());
        return;
      }
      const Json& products = json.at("products");
      text += fmt::format("products:         {} {} {} ({}, cuBLASLt {})\n", products.size(), what,
                          path.string(), json.at("device").get<std::string>(),
                          json.at("cublaslt").get<std::string>());
      for (size_t i = 0; each && i < products.size(); ++i) {
        const auto [key, choice] = choice_from_json(products[i]);
        text += fmt::format("  {}\n", describe(key, choice));
      }
    } catch (const std::exception& error) {
      text += fmt::format("products:         {} cannot be read: {}\n", path.string(), error.what());
    }
  };
  for (const fs::path& path : files_in(cache_folder())) describe_file(path, "searched, in", true);
  if (text.empty()) {
    text = fmt::format("products:         none searched yet in {}\n", cache_folder().string());
  }
  for (const fs::path& folder : shipped_folders()) {
    for (const fs::path& path : files_in(folder)) {
      describe_file(path, "come with the program, in", false);
    }
  }
  return text;
}

}  // namespace octet::cuda
