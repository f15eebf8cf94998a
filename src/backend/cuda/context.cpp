#include "backend/cuda/context.h"

#include <cstring>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

constexpr int64_t kStagingBytes = int64_t{8} << 20;
constexpr int64_t kHalf = kStagingBytes / 2;

}  // namespace

void fail_status(std::string_view what, cudaError_t status) {
  fail(what, "CUDA reports {} ({})", cudaGetErrorName(status), cudaGetErrorString(status));
}

void* DeviceAllocator::acquire(int64_t num_bytes, std::string_view label) {
  void* data = nullptr;
  const auto size = static_cast<size_t>(num_bytes > 0 ? num_bytes : 1);
  const cudaError_t status = cudaMalloc(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    fail("memory",
         "{} needs {}, but only {} of the device's {} are free; choose a smaller model, batch or "
         "length",
         label, format_bytes(num_bytes), format_bytes(static_cast<int64_t>(free_bytes)),
         format_bytes(static_cast<int64_t>(total_bytes)));
  }
  check(status, label);
  check(cudaMemsetAsync(data, 0, size, stream_), label);
  return data;
}

void DeviceAllocator::release(void* data, int64_t) noexcept {
  cudaStreamSynchronize(stream_);
  cudaFree(data);
}

cudaStream_t Context::open(int device) {
  check(cudaSetDevice(device), "CUDA device");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "CUDA stream");
  return stream;
}

Context::Context(int device, int64_t limit_bytes)
    : device_(device),
      stream_(open(device)),
      allocator_(limit_bytes, stream_),
      library_(std::make_unique<LibraryProducts>()) {
  check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device),
        "CUDA device");
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "CUDA device");
  portable_ = major != 9;
  check(cudaMalloc(reinterpret_cast<void**>(&counters_), sizeof(DeviceCounters)), "counters");
  check(cudaMemsetAsync(counters_, 0, sizeof(DeviceCounters), stream_), "counters");
  check(cudaMallocHost(reinterpret_cast<void**>(&staging_), kStagingBytes), "pinned staging");
  for (cudaEvent_t& event : staging_events_) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "CUDA event");
  }
}

Context::~Context() {
  cudaStreamSynchronize(stream_);
  for (tensor::Buffer& buffer : scratch_) buffer.reset();
  for (cudaEvent_t event : staging_events_) cudaEventDestroy(event);
  cudaFreeHost(staging_);
  cudaFree(counters_);
  cudaStreamDestroy(stream_);
}

void Context::force_portable() {
  portable_ = true;
  library_ = std::make_unique<LibraryProducts>(false);
}

void* Context::scratch(ScratchSlot slot, int64_t num_bytes) {
  tensor::Buffer& buffer = scratch_[slot];
  if (buffer.num_bytes() < num_bytes || buffer.empty()) {
    buffer.reset();
    buffer = allocator_.allocate(num_bytes, "CUDA workspace");
  }
  return buffer.data();
}

void Context::upload(const void* host, void* device, int64_t num_bytes) {
  if (num_bytes == 0) return;
  // Pageable memory of any size is read before the call returns, but waits for the stream.
  if (num_bytes > kHalf) {
    check(cudaMemcpyAsync(device, host, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice,
                          stream_),
          "upload");
    return;
  }
  const int64_t padded = (num_bytes + 255) / 256 * 256;
  int64_t begin = staging_used_ % kStagingBytes;
  if (begin / kHalf != (begin + padded - 1) / kHalf) {  // the next half, once its copies are done
    const int64_t next = (begin / kHalf + 1) % 2;
    check(cudaEventRecord(staging_events_[begin / kHalf], stream_), "upload");
    check(cudaEventSynchronize(staging_events_[next]), "upload");
    begin = next * kHalf;
  }
  std::memcpy(staging_ + begin, host, static_cast<size_t>(num_bytes));
  check(cudaMemcpyAsync(device, staging_ + begin, static_cast<size_t>(num_bytes),
                        cudaMemcpyHostToDevice, stream_),
        "upload");
  staging_used_ = begin + padded;
  if (staging_used_ % kHalf == 0) {  // this half is full to the brim
    const int64_t next = staging_used_ / kHalf % 2;
    check(cudaEventRecord(staging_events_[1 - next], stream_), "upload");
    check(cudaEventSynchronize(staging_events_[next]), "upload");
  }
}

void Context::download(const void* device, void* host, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check(cudaMemcpyAsync(host, device, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost,
                        stream_),
        "download");
  synchronize();
}

void Context::fill_zero(void* device, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check(cudaMemsetAsync(device, 0, static_cast<size_t>(num_bytes), stream_), "fill_zero");
}

void Context::synchronize() { check(cudaStreamSynchronize(stream_), "CUDA stream"); }

double Context::time_seconds(const std::function<void()>& body, int repeats) {
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "timing");
  check(cudaEventRecord(events[0], stream_), "timing");
  for (int i = 0; i < repeats; ++i) body();
  check(cudaEventRecord(events[1], stream_), "timing");
  check(cudaEventSynchronize(events[1]), "timing");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, events[0], events[1]), "timing");
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  return 1e-3 * milliseconds / repeats;
}

}  // namespace octet::cuda
