// Device memory through CUDA's virtual memory: addresses are reserved, physical pages come and go
// beneath them. So a buffer can give its memory away and get it back at the same address, and
// scratch can grow where it stands: recorded graphs stay valid through both.
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor/buffer.h"

namespace octet::cuda {

// What is counted is what the device gives: whole pages. Memory is zeroed on the stream that the
// ops run on. Giving pages back waits for the stream.
class Arena final : public tensor::Allocator {
 public:
  // Reserved addresses with physical memory at their beginning.
  struct Range {
    uint64_t base = 0;
    int64_t reserved = 0;
    int64_t mapped = 0;
    std::vector<std::pair<uint64_t, int64_t>> pieces;  // handle and size of the physical memory
  };

  // Error where the driver or the device has no virtual memory management. 0: no limit.
  Arena(int device, int64_t limit_bytes, cudaStream_t stream);
  ~Arena() override;

  // Makes the first `num_bytes` of a range memory, contents undefined where it is new, and returns
  // its address, which never changes. The range is the caller's to drop.
  void* grow(Range& range, int64_t num_bytes, std::string_view label);
  void drop(Range& range) noexcept;

  // The most that the device said was in use, by anybody, when memory had been mapped.
  int64_t device_peak_bytes() const { return device_peak_bytes_; }

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void* data, int64_t num_bytes, bool unmapped) noexcept override;
  void unmap(void* data, int64_t num_bytes) override;
  void map(void* data, int64_t num_bytes, std::string_view label) override;

 private:
  void reserve(Range& range, int64_t num_bytes);
  void map_more(Range& range, int64_t num_bytes, std::string_view label);
  void unmap_all(Range& range) noexcept;
  bool is_small(int64_t num_bytes) const { return num_bytes < page_bytes(); }
  int64_t take_small(int64_t num_bytes, std::string_view label);

  int device_;
  cudaStream_t stream_;
  int64_t device_bytes_;
  int64_t device_peak_bytes_ = 0;
  std::unordered_map<void*, Range> large_;
  Range small_;                             // of the buffers that share pages
  int64_t small_end_ = 0;                   // nothing is in use from here on
  std::map<int64_t, int64_t> small_holes_;  // offset and size of what is free before it
};

}  // namespace octet::cuda
