// Pages of keys and values for all layers, counted by reference. One pool serves rollout, scoring
// and training; a page index means the same page in every layer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "io/model_config.h"
#include "ops/backend.h"

namespace octet::model {

class KvStore {
 public:
  static constexpr int64_t kPageSize = 16;
  static constexpr std::string_view kLabel = "KV pages";  // of its memory

  // dtype BF16, F32 or E4M3 (then with per token and head scales).
  KvStore(tensor::Allocator& allocator, const io::ModelConfig& config, tensor::DType dtype,
          int64_t num_pages);

  int64_t num_pages() const { return num_pages_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  tensor::DType dtype() const { return dtype_; }
  static int64_t pages_for(int64_t num_tokens) { return (num_tokens + kPageSize - 1) / kPageSize; }

  // A free page with one reference, or nothing when none is left.
  std::optional<int32_t> allocate();
  void add_reference(int32_t page) { ++references_[page]; }
  bool is_shared(int32_t page) const { return references_[page] > 1; }
  void release(int32_t page);                     // free again when nobody refers to it
  void release_all(std::vector<int32_t>& pages);  // and empties the list

  ops::KvCacheView layer(int64_t index) const { return layers_[index]; }
  // Gives the memory of all pages back, which must be free, and takes it again, zeroed, at the same
  // addresses: recordings that read the pages stay valid.
  void unmap();
  void map();
  bool is_unmapped() const { return buffer_.is_unmapped(); }

  // Copies pages in every layer.
  void copy(ops::Backend& backend, std::span<const ops::KvPageCopy> copies);

 private:
  tensor::DType dtype_;
  int64_t num_pages_;
  tensor::Buffer buffer_;  // of all layers
  std::vector<ops::KvCacheView> layers_;
  std::vector<int32_t> free_;
  std::vector<int32_t> references_;
};

}  // namespace octet::model
