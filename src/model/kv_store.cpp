#include "model/kv_store.h"

#include "base/error.h"

namespace octet::model {

using tensor::DType;

KvStore::KvStore(tensor::Allocator& allocator, const io::ModelConfig& config, DType dtype,
                 int64_t num_pages)
    : dtype_(dtype), num_pages_(num_pages), references_(static_cast<size_t>(num_pages), 0) {
  const tensor::Shape values{num_pages, config.num_key_value_heads, kPageSize, config.head_dim};
  const tensor::Shape scales{num_pages, config.num_key_value_heads, kPageSize};
  const auto make = [&](DType type, const tensor::Shape& shape) {
    buffers_.push_back(allocator.allocate(type, shape, "KV pages"));
    return buffers_.back().view(type, shape);
  };
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    ops::KvCacheView view;
    view.k = make(dtype, values);
    view.v = make(dtype, values);
    if (dtype == DType::kE4M3) {
      view.k_scale = make(DType::kF32, scales);
      view.v_scale = make(DType::kF32, scales);
    }
    layers_.push_back(view);
  }
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

std::optional<int32_t> KvStore::allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  return page;
}

void KvStore::release(int32_t page) {
  OCTET_ASSERT(references_[page] > 0);
  if (--references_[page] == 0) free_.push_back(page);
}

void KvStore::release_all(std::vector<int32_t>& pages) {
  for (const int32_t page : pages) release(page);
  pages.clear();
}

void KvStore::copy(ops::Backend& backend, int32_t source, int32_t destination, int32_t num_tokens) {
  for (const ops::KvCacheView& layer : layers_) {
    backend.kv_copy({layer, source, destination, num_tokens});
  }
}

}  // namespace octet::model
