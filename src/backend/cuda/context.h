// What every CUDA op may use: one stream, memory with exact accounting, scratch that only grows,
// pinned staging for uploads, counters on the device.
#pragma once

#include <array>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <string_view>

#include "tensor/buffer.h"

namespace octet::cuda {

// cudaMalloc'ed memory of one device. Zeroed on the stream that the ops run on.
class DeviceAllocator final : public tensor::Allocator {
 public:
  DeviceAllocator(int64_t limit_bytes, cudaStream_t stream)
      : Allocator(limit_bytes), stream_(stream) {}

 protected:
  void* acquire(int64_t num_bytes, std::string_view label) override;
  void release(void* data, int64_t num_bytes) noexcept override;

 private:
  cudaStream_t stream_;
};

class LibraryProducts;

// Device counters in the order of ops::QuantizeCounters.
struct DeviceCounters {
  unsigned long long elements, saturated, underflowed, not_a_number;
};

// Scratch of different ops or operands, each valid until the next take of the same slot.
enum ScratchSlot {
  kScratchWeights,    // transposed or padded weights
  kScratchInputs,     // transposed or padded inputs
  kScratchScales,     // of quantised gradients
  kScratchScales2,    // of a second operand
  kScratchSums,       // F32 partial results
  kScratchAttention,  // partial results of key chunks
  kScratchSampling,   // parameters of rows
  kScratchLibrary,    // cuBLASLt's workspace
  kNumScratchSlots
};

class Context {
 public:
  Context(int device, int64_t limit_bytes);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }
  int num_multiprocessors() const { return num_multiprocessors_; }
  // Whether kernels that every architecture has must serve, and not Hopper's own.
  bool portable() const { return portable_; }
  void force_portable();  // and no library, whose products are in another class
  cudaStream_t stream() const { return stream_; }
  DeviceAllocator& allocator() { return allocator_; }
  DeviceCounters* counters() const { return counters_; }
  LibraryProducts& library() { return *library_; }

  // At least `num_bytes` of device memory, contents undefined. Growing waits for the stream.
  void* scratch(ScratchSlot slot, int64_t num_bytes);
  template <class T>
  T* scratch(ScratchSlot slot, int64_t count) {
    return static_cast<T*>(scratch(slot, count * static_cast<int64_t>(sizeof(T))));
  }

  // Queues a copy; `host` may change as soon as this returns.
  void upload(const void* host, void* device, int64_t num_bytes);
  void download(const void* device, void* host, int64_t num_bytes);  // waits
  void fill_zero(void* device, int64_t num_bytes);
  void synchronize();
  // Seconds of one of `repeats` calls of `body`, on the stream's own clock; waits.
  double time_seconds(const std::function<void()>& body, int repeats);

 private:
  // Makes the owner of the stream exist before the allocator that uses it.
  static cudaStream_t open(int device);

  int device_;
  int num_multiprocessors_ = 0;
  bool portable_ = false;
  cudaStream_t stream_;
  DeviceAllocator allocator_;
  std::array<tensor::Buffer, kNumScratchSlots> scratch_;
  std::unique_ptr<LibraryProducts> library_;
  DeviceCounters* counters_ = nullptr;
  char* staging_ = nullptr;  // pinned, used as a ring
  int64_t staging_used_ = 0;
  std::array<cudaEvent_t, 2> staging_events_{};  // the end of each half's last copy
};

}  // namespace octet::cuda
