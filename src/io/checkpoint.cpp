#include "io/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace octet::io {
namespace {

namespace fs = std::filesystem;
using tensor::DType;
using tensor::Granularity;
using tensor::Shape;
using tensor::TensorView;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

std::string join_path(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

// Tensor name to shard name, as the index says.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const SortedJson index = parse_sorted_json(read_file(path), path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail(path, "an object \"weight_map\" from tensor to file is required, but missing");
  }
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const std::string shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.empty() || shard.find('/') != std::string::npos || !shard.ends_with(".safetensors")) {
      fail(path,
           "tensor \"{}\": weight_map must name a .safetensors file of this folder, but says "
           "{}",
           name, file.dump());
    }
    weight_map[name] = shard;
  }
  return weight_map;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  const auto add_file = [&](const std::string& file) {
    files_.emplace_back(file);
    for (const std::string& name : files_.back().names()) {
      const auto [entry, added] = file_numbers_.try_emplace(name, files_.size() - 1);
      if (!added) {
        fail(file, "tensor \"{}\" must be in one file, but is also in {}", name,
             files_[entry->second].path());
      }
    }
  };
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    add_file(path);
    return;
  }
  const std::string single = join_path(path, kSingleFile);
  const std::string index = join_path(path, kIndexFile);
  if (!fs::exists(index, ignored)) {
    if (!fs::exists(single, ignored)) {
      fail(path, "{} or {} is required, but the folder has neither", kSingleFile, kIndexFile);
    }
    add_file(single);
    return;
  }

  const std::map<std::string, std::string> weight_map = read_weight_map(index);
  std::map<std::string, size_t> shards;
  for (const auto& [name, shard] : weight_map) shards.try_emplace(shard, 0);
  if (fs::exists(single, ignored) && !shards.contains(kSingleFile)) {
    fail(path,
         "one set of weights is required, but the folder has {} and an index of other files; "
         "remove the one that is out of date",
         kSingleFile);
  }
  for (auto& [shard, number] : shards) {
    number = files_.size();
    add_file(join_path(path, shard));
  }
  for (const auto& [name, shard] : weight_map) {
    const auto found = file_numbers_.find(name);
    if (found == file_numbers_.end() || found->second != shards[shard]) {
      fail(index, "tensor \"{}\" must be in {}, but is not there", name, shard);
    }
  }
  for (const auto& [name, number] : file_numbers_) {
    if (!weight_map.contains(name)) {
      fail(index, "tensor \"{}\" of {} must be named in weight_map, but is not", name,
           files_[number].path());
    }
  }
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, number] : file_numbers_) names.push_back(name);
  return names;
}

bool Checkpoint::has(std::string_view name) const { return file_numbers_.contains(name); }

const SafetensorsFile& Checkpoint::file_of(std::string_view name) const {
  const auto found = file_numbers_.find(name);
  if (found == file_numbers_.end()) {
    const std::string near = nearest_name(name, names());
    fail(path_, "tensor \"{}\" is required, but missing{}", name,
         near.empty() ? "" : fmt::format("; the nearest is \"{}\"", near));
  }
  return files_[found->second];
}

TensorView Checkpoint::view(std::string_view name) {
  const TensorView result = peek(name);
  used_.emplace(name);
  return result;
}

TensorView Checkpoint::peek(std::string_view name) const { return file_of(name).view(name); }

void Checkpoint::require_shape(std::string_view name, const Shape& given,
                               const Shape& required) const {
  if (given == required) return;
  fail(path_, "tensor \"{}\" must have the shape {} by config.json, but has {}", name,
       required.to_string(), given.to_string());
}

TensorView Checkpoint::view(std::string_view name, const Shape& shape) {
  const TensorView result = view(name);
  require_shape(name, result.shape, shape);
  return result;
}

TensorSpec Checkpoint::spec(std::string_view name, const Shape& shape) {
  TensorSpec result = file_of(name).spec(name);
  used_.emplace(name);
  require_shape(name, result.shape, shape);
  return result;
}

void Checkpoint::read(std::string_view name, int64_t offset, std::span<uint8_t> to) const {
  file_of(name).read(name, offset, to);
}

void Checkpoint::mark_used(std::string_view name) {
  file_of(name);
  used_.emplace(name);
}

std::vector<std::string> Checkpoint::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, number] : file_numbers_) {
    if (!used_.contains(name)) names.push_back(name);
  }
  return names;
}

void Checkpoint::expect_all_used() const {
  constexpr size_t kMostNames = 5;
  const std::vector<std::string> names = unused();
  if (names.empty()) return;
  const size_t shown = std::min(names.size(), kMostNames);
  fail(path_, "every tensor must belong to the model of config.json, but {} do not: {}{}",
       names.size(), fmt::join(names.begin(), names.begin() + shown, ", "),
       shown < names.size() ? ", …" : "");
}

void write_checkpoint(const std::string& folder, std::vector<TensorSpec> specs,
                      const TensorProducer& produce, int64_t max_shard_bytes,
                      const Metadata& metadata) {
  std::vector<std::vector<TensorSpec>> shards(1);
  int64_t total_bytes = 0;
  int64_t shard_bytes = 0;
  for (TensorSpec& spec : specs) {
    const int64_t num_bytes = spec.shape.num_elements() * tensor::dtype_bytes(spec.dtype);
    if (!shards.back().empty() && shard_bytes + num_bytes > max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(std::move(spec));
    shard_bytes += num_bytes;
    total_bytes += num_bytes;
  }
  const std::string single = join_path(folder, kSingleFile);
  const std::string index_path = join_path(folder, kIndexFile);
  std::error_code ignored;
  if (shards.size() == 1) {
    write_safetensors(single, std::move(shards[0]), produce, metadata);
    fs::remove(index_path, ignored);
    return;
  }
  SortedJson weight_map = SortedJson::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    for (const TensorSpec& spec : shards[i]) weight_map[spec.name] = name;
    write_safetensors(join_path(folder, name), std::move(shards[i]), produce, metadata);
  }
  const SortedJson index = {{"metadata", {{"total_size", total_bytes}}},
                            {"weight_map", std::move(weight_map)}};
  write_file_atomically(index_path, index.dump(2) + "\n");
  fs::remove(single, ignored);
}

void write_checkpoint(const std::string& folder, const std::vector<NamedTensor>& tensors,
                      int64_t max_shard_bytes, const Metadata& metadata) {
  std::vector<TensorSpec> specs;
  std::map<std::string_view, const TensorView*> views;
  for (const NamedTensor& tensor : tensors) {
    specs.push_back({tensor.name, tensor.view.dtype, tensor.view.shape});
    views[tensor.name] = &tensor.view;
  }
  write_checkpoint(
      folder, std::move(specs), [&](const TensorSpec& spec) { return *views.at(spec.name); },
      max_shard_bytes, metadata);
}

}  // namespace octet::io
