#include "model/kv_store.h"

#include <utility>

#include "base/error.h"

namespace octet::model {

using tensor::DType;
using tensor::TensorView;

KvStore::KvStore(tensor::Allocator& allocator, const io::ModelConfig& config, DType dtype,
                 int64_t num_pages)
    : dtype_(dtype), num_pages_(num_pages), references_(static_cast<size_t>(num_pages), 0) {
  const tensor::Shape values{num_pages, config.num_key_value_heads, kPageSize, config.head_dim};
  const tensor::Shape scales{num_pages, config.num_key_value_heads, kPageSize};
  constexpr int64_t kAlignment = 1024;
  const bool scaled = dtype == DType::kE4M3;
  const auto padded = [](DType type, const tensor::Shape& shape) {
    const int64_t num_bytes = shape.num_elements() * tensor::dtype_bytes(type);
    return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const int64_t layer_bytes =
      2 * (padded(dtype, values) + (scaled ? padded(DType::kF32, scales) : 0));
  buffer_ = allocator.allocate(layer_bytes * config.num_hidden_layers, kLabel);
  auto* next = static_cast<uint8_t*>(buffer_.data());
  const auto make = [&](DType type, const tensor::Shape& shape) {
    return TensorView(std::exchange(next, next + padded(type, shape)), type, shape);
  };
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    ops::KvCacheView view;
    view.k = make(dtype, values);
    view.v = make(dtype, values);
    if (scaled) {
      view.k_scale = make(DType::kF32, scales);
      view.v_scale = make(DType::kF32, scales);
    }
    layers_.push_back(view);
  }
  for (int64_t page = num_pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

void KvStore::unmap() {
  OCTET_ASSERT(num_free() == num_pages());
  buffer_.unmap();
}

void KvStore::map() { buffer_.map(kLabel); }

std::optional<int32_t> KvStore::allocate() {
  OCTET_ASSERT(!is_unmapped());
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

void KvStore::copy(ops::Backend& backend, std::span<const ops::KvPageCopy> copies) {
  for (const ops::KvCacheView& layer : layers_) backend.kv_copy({layer, copies});
}

}  // namespace octet::model
