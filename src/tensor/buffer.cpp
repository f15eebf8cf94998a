#include "tensor/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "base/strings.h"

namespace octet::tensor {

void* allocate_aligned(int64_t num_bytes) {
  constexpr int64_t kAlignment = 256;
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t alignment = num_bytes >= 2 * kHugePage ? kHugePage : kAlignment;
  const int64_t padded =
      (std::max<int64_t>(num_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* data = nullptr;
  if (posix_memalign(&data, static_cast<size_t>(alignment), static_cast<size_t>(padded)) != 0) {
    return nullptr;
  }
#if defined(__linux__)
  // Advice only: whether the system follows it shows in the speed alone.
  if (alignment == kHugePage) {
    madvise(data, static_cast<size_t>(padded / kHugePage * kHugePage), MADV_HUGEPAGE);
  }
#endif
  return data;
}

Buffer Allocator::allocate(int64_t num_bytes, std::string_view label) {
  OCTET_ASSERT(num_bytes >= 0);
  if (limit_bytes_ > 0 && bytes_in_use_ + num_bytes > limit_bytes_) {
    fail("memory",
         "{} needs {}, but {} of the allowed {} are in use; raise --device-memory-limit or choose "
         "smaller batches or lengths",
         label, format_bytes(num_bytes), format_bytes(bytes_in_use_), format_bytes(limit_bytes_));
  }
  Buffer buffer;
  buffer.data_ = acquire(num_bytes, label);
  buffer.allocator_ = this;
  buffer.num_bytes_ = num_bytes;
  bytes_in_use_ += num_bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_in_use_);
  return buffer;
}

Buffer Allocator::allocate(DType dtype, const Shape& shape, std::string_view label) {
  return allocate(shape.num_elements() * dtype_bytes(dtype), label);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    allocator_ = std::exchange(other.allocator_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    num_bytes_ = std::exchange(other.num_bytes_, 0);
  }
  return *this;
}

void Buffer::reset() noexcept {
  if (data_ == nullptr) return;
  allocator_->release(data_, num_bytes_);
  allocator_->bytes_in_use_ -= num_bytes_;
  data_ = nullptr;
}

TensorView Buffer::view(DType dtype, const Shape& shape) const {
  OCTET_ASSERT(shape.num_elements() * dtype_bytes(dtype) <= num_bytes_);
  return TensorView(data_, dtype, shape);
}

void* HostAllocator::acquire(int64_t num_bytes, std::string_view) {
  void* data = allocate_aligned(num_bytes);
  if (data == nullptr) {
    fail("memory", "the system has no {} left; choose a smaller model, batch or length",
         format_bytes(num_bytes));
  }
  std::memset(data, 0, static_cast<size_t>(num_bytes));
  return data;
}

void HostAllocator::release(void* data, int64_t) noexcept { std::free(data); }

void* PlanningAllocator::acquire(int64_t num_bytes, std::string_view label) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.label == label; });
  if (entry == entries_.end()) {
    entries_.push_back({std::string(label), num_bytes});
  } else {
    entry->num_bytes += num_bytes;
  }
  return this;
}

}  // namespace octet::tensor
