// The weights of a Hugging Face folder: model.safetensors, or its shards with their index.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "tensor/tensor.h"

namespace octet::io {

// Opens a folder or a single .safetensors file. With an index, weight_map and the shards it names
// must agree in both directions; other files of the folder are ignored.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  bool has(std::string_view name) const;

  // The tensor, counted as used; valid as long as this object. Error where it is missing, naming
  // the nearest name.
  tensor::TensorView view(std::string_view name);

  // The same, and an Error naming the tensor unless it has this shape.
  tensor::TensorView view(std::string_view name, const tensor::Shape& shape);

  // What the tensor is, counted as used, its values untouched; the same errors. They are read in
  // pieces, from byte `offset` of the tensor on, from several threads at once.
  TensorSpec spec(std::string_view name, const tensor::Shape& shape);
  void read(std::string_view name, int64_t offset, std::span<uint8_t> to) const;

  // The tensor without counting it.
  tensor::TensorView peek(std::string_view name) const;

  // Counts a tensor as used without looking at it (a tied head that the file also holds).
  void mark_used(std::string_view name);
  std::vector<std::string> unused() const;
  // Error naming up to five tensors that nothing asked for.
  void expect_all_used() const;

 private:
  const SafetensorsFile& file_of(std::string_view name) const;
  void require_shape(std::string_view name, const tensor::Shape& given,
                     const tensor::Shape& required) const;

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> file_numbers_;  // by tensor
  std::set<std::string, std::less<>> used_;
};

inline constexpr int64_t kMaxShardBytes = 5'000'000'000;

// Writes model.safetensors, or above `max_shard_bytes` of tensor data model-0000k-of-0000n shards
// and model.safetensors.index.json. The folder must exist; each file is renamed into place, the
// index last.
void write_checkpoint(const std::string& folder, std::vector<TensorSpec> specs,
                      const TensorProducer& produce, int64_t max_shard_bytes = kMaxShardBytes,
                      const Metadata& metadata = kPytorchMetadata);
void write_checkpoint(const std::string& folder, const std::vector<NamedTensor>& tensors,
                      int64_t max_shard_bytes = kMaxShardBytes,
                      const Metadata& metadata = kPytorchMetadata);

}  // namespace octet::io
