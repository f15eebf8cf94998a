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
class Allocator {
 public:
  explicit Allocator(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  virtual ~Allocator() = default;

  Buffer allocate(int64_t num_bytes, std::string_view label);
  Buffer allocate(DType dtype, const Shape& shape, std::string_view label);

  int64_t bytes_in_use() const { return bytes_in_use_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t limit_bytes() const { return limit_bytes_; }  // 0: no limit

 protected:
  // At least 256-byte aligned, zeroed; never null.
  virtual void* acquire(int64_t num_bytes, std::string_view label) = 0;
  virtual void release(void* data, int64_t num_bytes) noexcept = 0;

 private:
  friend class Buffer;
  int64_t limit_bytes_;
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
  TensorView view(DType dtype, const Shape& shape) const;  // the shape must fit

 private:
  friend class Allocator;
  Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// Ordinary memory of this process.
class HostAllocator final : public Allocator {
 public:
  explicit HostAllocator(int64_t limit_bytes = 0) : Allocator(limit_bytes) {}

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void* data, int64_t num_bytes) noexcept override;
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
  PlanningAllocator() : Allocator(0) {}
  const std::vector<Entry>& entries() const { return entries_; }  // equal labels added up

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void*, int64_t) noexcept override {}

 private:
  std::vector<Entry> entries_;
};

}  // namespace octet::tensor
