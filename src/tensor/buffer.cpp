#include "tensor/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "base/strings.h"

namespace octet::tensor {

void* allocate_aligned(int64_t num_bytes) {
  constexpr int64_t kAlignment = 256;  // as Allocator's
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

void Allocator::charge(int64_t num_bytes, std::string_view label) {
  if (limit_bytes_ > 0 && bytes_in_use_ + num_bytes > limit_bytes_) {
    fail("memory",
         "{} needs {}, but {} of the allowed {} are in use; choose a smaller model, batch or "
         "length, or raise --device-memory-limit (run.device_memory_limit)",
         label, format_bytes(num_bytes), format_bytes(bytes_in_use_), format_bytes(limit_bytes_));
  }
  bytes_in_use_ += num_bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_in_use_);
}

Buffer Allocator::allocate(int64_t num_bytes, std::string_view label) {
  OCTET_ASSERT(num_bytes >= 0);
  Buffer buffer;
  buffer.data_ = acquire(num_bytes, label);
  buffer.allocator_ = this;
  buffer.num_bytes_ = num_bytes;
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
    unmapped_ = std::exchange(other.unmapped_, false);
  }
  return *this;
}

void Buffer::reset() noexcept {
  if (data_ == nullptr) return;
  allocator_->release(data_, num_bytes_, unmapped_);
  data_ = nullptr;
  unmapped_ = false;
}

void Buffer::unmap() {
  OCTET_ASSERT(!empty() && !unmapped_);
  allocator_->unmap(data_, num_bytes_);
  unmapped_ = true;
}

void Buffer::map(std::string_view label) {
  OCTET_ASSERT(unmapped_);
  allocator_->map(data_, num_bytes_, label);
  unmapped_ = false;
}

TensorView Buffer::view(DType dtype, const Shape& shape) const {
  OCTET_ASSERT(shape.num_elements() * dtype_bytes(dtype) <= num_bytes_);
  return TensorView(data_, dtype, shape);
}

void* HostAllocator::acquire(int64_t num_bytes, std::string_view label) {
  charge(num_bytes, label);
  void* data = allocate_aligned(num_bytes);
  if (data == nullptr) {
    refund(num_bytes);
    fail("memory", "the system has no {} left; choose a smaller model, batch or length",
         format_bytes(num_bytes));
  }
  std::memset(data, 0, static_cast<size_t>(num_bytes));
  return data;
}

void HostAllocator::release(void* data, int64_t num_bytes, bool unmapped) noexcept {
  if (!unmapped) refund(num_bytes);
  std::free(data);
}

// The system takes the pages that lie wholly within and gives zeroed ones when they are next used.
void HostAllocator::unmap(void* data, int64_t num_bytes) {
  auto* begin = static_cast<uint8_t*>(data);
  uint8_t* end = begin + num_bytes;
#if defined(__linux__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto up = [&](uint8_t* p) {
    return p + (page - reinterpret_cast<uintptr_t>(p) % page) % page;
  };
  uint8_t* first = up(begin);
  uint8_t* last = end - reinterpret_cast<uintptr_t>(end) % page;
  if (first < last && madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) == 0) {
    std::memset(begin, 0, static_cast<size_t>(first - begin));
    begin = last;
  }
#endif
  std::memset(begin, 0, static_cast<size_t>(end - begin));
  refund(num_bytes);
}

void HostAllocator::map(void*, int64_t num_bytes, std::string_view label) {
  charge(num_bytes, label);
}

void* PlanningAllocator::acquire(int64_t num_bytes, std::string_view label) {
  const bool small = page_bytes() > 1 && num_bytes < page_bytes();
  const int64_t taken = small ? aligned(num_bytes) : whole_pages(num_bytes);
  const int64_t shared = whole_pages(shared_bytes_);
  if (small) shared_bytes_ += taken;
  charge(small ? whole_pages(shared_bytes_) - shared : taken, label);
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.label == label; });
  if (entry == entries_.end()) {
    entries_.push_back({std::string(label), taken});
  } else {
    entry->num_bytes += taken;
  }
  return this;
}

std::vector<PlanningAllocator::Entry> PlanningAllocator::entries() const {
  std::vector<Entry> all = entries_;
  if (const int64_t rest = whole_pages(shared_bytes_) - shared_bytes_; rest > 0) {
    all.push_back({"rest of shared pages", rest});
  }
  return all;
}

}  // namespace octet::tensor
