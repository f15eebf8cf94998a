// What every CUDA op may use: one stream, memory with exact accounting, scratch that only grows,
// pinned staging for uploads and downloads, counters on the device.
#pragma once

#include <array>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <string_view>

#include "backend/cuda/arena.h"
#include "backend/cuda/upload_ring.h"

namespace octet::cuda {

class LibraryProducts;

// Device counters in the order of ops::QuantizeCounters.
struct DeviceCounters {
  unsigned long long elements, saturated, underflowed, not_a_number;
};

// What the blocks of the prefill attention over BF16 pages hand to each other. All 0 between calls.
struct PrefillQueue {
  int next_item;
  int found_nan;    // not 0: a row has one
  int blocks_read;  // that know of it
};

// Scratch of different ops or operands, each valid until the next take of the same slot.
enum ScratchSlot {
  kScratchWeights,    // transposed or padded weights
  kScratchInputs,     // transposed or padded inputs
  kScratchScales,     // of quantised gradients
  kScratchScales2,    // of a second operand
  kScratchSums,       // F32 partial results
  kScratchAttention,  // partial results of key chunks
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
  cudaStream_t stream() const { return stream_.get(); }
  Arena& allocator() { return allocator_; }
  const Arena& allocator() const { return allocator_; }
  DeviceCounters* counters() const { return static_cast<DeviceCounters*>(counters_.data()); }
  PrefillQueue* prefill_queue() const { return static_cast<PrefillQueue*>(prefill_queue_.data()); }
  // Two counters of what the blocks of decoding have taken, 0 between launches.
  int* decode_queues() const { return static_cast<int*>(decode_queues_.data()); }
  LibraryProducts& library() const { return *library_; }

  // What the device says is in use, less what was when this object was made.
  int64_t device_bytes_in_use() const;
  int64_t device_peak_bytes() const;

  // At least `num_bytes` of device memory, contents undefined; a slot grows where it stands, so
  // that its address never changes.
  void* scratch(ScratchSlot slot, int64_t num_bytes);
  // Gives all of it back, addresses too: only while nothing is recorded that uses it.
  void drop_scratch();
  // Whether the stream's work is recorded and not run: then nothing may wait, grow or upload.
  bool is_recording() const;
  template <class T>
  T* scratch(ScratchSlot slot, int64_t count) {
    return static_cast<T*>(scratch(slot, count * static_cast<int64_t>(sizeof(T))));
  }

  // Queues a copy; `host` may change as soon as this returns.
  void upload(const void* host, void* device, int64_t num_bytes);
  void upload_pieces(void* device, int64_t num_bytes, const ops::Backend::ReadPiece& read);
  void download(const void* device, void* host, int64_t num_bytes);  // waits
  int64_t begin_download(const void* device, int64_t num_bytes);     // as Backend's
  void end_download(int64_t ticket, void* host);
  void fill_zero(void* device, int64_t num_bytes);
  void synchronize();
  // Seconds of one of `repeats` calls of `body`, on the stream's own clock; waits.
  double time_seconds(const std::function<void()>& body, int repeats);

 private:
  struct DestroyStream {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  static cudaStream_t open(int device);
  void require_running(std::string_view what) const;
  // Queues a copy from or to pinned memory.
  void copy(const void* from, void* to, int64_t num_bytes, cudaMemcpyKind kind,
            std::string_view what);

  struct Download {
    char* pinned = nullptr;
    int64_t capacity = 0, num_bytes = 0;
    cudaEvent_t done = nullptr;
  };

  int device_;
  int num_multiprocessors_ = 0;
  bool portable_ = false;
  int64_t used_by_others_ = 0;                          // and by the CUDA context itself
  std::unique_ptr<CUstream_st, DestroyStream> stream_;  // outlives the allocator, which uses it
  Arena allocator_;
  std::array<Arena::Range, kNumScratchSlots> scratch_;
  std::unique_ptr<LibraryProducts> library_;
  tensor::Buffer counters_, prefill_queue_, decode_queues_;
  std::unique_ptr<UploadRing> ring_;  // of large arrays, made when the first one comes
  char* staging_ = nullptr;           // pinned, used as a ring
  int64_t staging_used_ = 0;
  std::array<cudaEvent_t, 2> staging_events_{};  // the end of each half's last copy
  std::array<Download, ops::Backend::kMaxDownloads> downloads_;
  int64_t num_downloads_ = 0;
};

}  // namespace octet::cuda
