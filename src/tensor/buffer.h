// Owned memory of a backend, drawn from an accounted allocator with a limit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

namespace octet::tensor {

class Buffer;

// At least 256-byte aligned memory, contents undefined, for std::free; null where there is none.
// Large blocks lie in huge pages where the system has them: rows of wide matrices are further apart
// than a small page, and their translations would not fit the processor's tables.
void* allocate_aligned(int64_t num_bytes);

// Where buffers come from. Accounting is exact; allocation past the limit throws Error naming the
// label, the bytes asked for, in use and allowed, and what to change. One thread at a time.
//
// Memory comes in pages of `page_bytes`: a buffer of a page or more owns whole ones, smaller
// buffers share pages, packed. Whole pages are what is counted. With pages of one byte a buffer
// takes what it was asked for.
class Allocator {
 public:
  explicit Allocator(int64_t limit_bytes, int64_t page_bytes = 1)
      : limit_bytes_(limit_bytes), page_bytes_(page_bytes) {}
  virtual ~Allocator() = default;

  Buffer allocate(int64_t num_bytes, std::string_view label);
  Buffer allocate(DType dtype, const Shape& shape, std::string_view label);

  int64_t bytes_in_use() const { return bytes_in_use_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t limit_bytes() const { return limit_bytes_; }  // 0: no limit
  int64_t page_bytes() const { return page_bytes_; }
  int64_t whole_pages(int64_t num_bytes) const {
    return (num_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  }

 protected:
  static constexpr int64_t kAlignment = 256;
  static int64_t aligned(int64_t num_bytes) {
    return num_bytes > 0 ? (num_bytes + kAlignment - 1) / kAlignment * kAlignment : kAlignment;
  }

  // At least kAlignment aligned, zeroed; never null. Charges what it takes.
  virtual void* acquire(int64_t num_bytes, std::string_view label) = 0;
  // Refunds it, unless `unmapped` already did.
  virtual void release(void* data, int64_t num_bytes, bool unmapped) noexcept = 0;
  virtual void unmap(void* data, int64_t num_bytes) = 0;
  virtual void map(void* data, int64_t num_bytes, std::string_view label) = 0;

  void charge(int64_t num_bytes, std::string_view label);
  void refund(int64_t num_bytes) noexcept { bytes_in_use_ -= num_bytes; }

 private:
  friend class Buffer;
  int64_t limit_bytes_;
  int64_t page_bytes_;
  int64_t bytes_in_use_ = 0;
  int64_t peak_bytes_ = 0;
};

// Owns one allocation; movable. The allocator must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { reset(); }

  void reset() noexcept;
  bool empty() const { return data_ == nullptr; }
  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

  // Gives the memory back and keeps the address: views stay, but nothing may use them until `map`
  // has put zeroed memory there again, within the limit (Error as by `allocate`).
  void unmap();
  void map(std::string_view label);
  bool is_unmapped() const { return unmapped_; }

  TensorView view(DType dtype, const Shape& shape) const;  // the shape must fit

 private:
  friend class Allocator;
  Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
  bool unmapped_ = false;
};

// Ordinary memory of this process.
class HostAllocator final : public Allocator {
 public:
  explicit HostAllocator(int64_t limit_bytes = 0) : Allocator(limit_bytes) {}

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void* data, int64_t num_bytes, bool unmapped) noexcept override;
  void unmap(void* data, int64_t num_bytes) override;
  void map(void* data, int64_t num_bytes, std::string_view label) override;
};

// Hands out addresses without memory behind them and writes down what was asked for: the memory
// plan of anything whose constructor only allocates. Nothing may be read or written through its
// buffers.
class PlanningAllocator final : public Allocator {
 public:
  struct Entry {
    std::string label;
    int64_t num_bytes = 0;
  };
  explicit PlanningAllocator(int64_t page_bytes = 1) : Allocator(0, page_bytes) {}
  // Equal labels added up, and what is left free of the pages that small buffers share.
  std::vector<Entry> entries() const;

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void*, int64_t, bool) noexcept override {}
  void unmap(void*, int64_t) override {}
  void map(void*, int64_t, std::string_view) override {}

 private:
  std::vector<Entry> entries_;
  int64_t shared_bytes_ = 0;  // of small buffers
};

}  // namespace octet::tensor
