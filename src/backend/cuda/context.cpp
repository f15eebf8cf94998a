#include "backend/cuda/context.h"

#include <algorithm>
#include <cstring>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

constexpr int64_t kStagingBytes = int64_t{8} << 20;
constexpr int64_t kHalf = kStagingBytes / 2;
constexpr int64_t kSmallCopy = 65536;  // bytes

}  // namespace

void fail_status(std::string_view what, cudaError_t status) {
  fail(what, "CUDA reports {} ({})", cudaGetErrorName(status), cudaGetErrorString(status));
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
      allocator_(device, limit_bytes, stream()),
      library_(std::make_unique<LibraryProducts>()) {
  check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device),
        "CUDA device");
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "CUDA device");
  portable_ = major != 9;
  used_by_others_ = device_bytes_in_use();
  counters_ = allocator_.allocate(sizeof(DeviceCounters), "counters");
  prefill_queue_ = allocator_.allocate(sizeof(PrefillQueue), "counters");
  decode_queues_ = allocator_.allocate(2 * sizeof(int), "counters");
  check(cudaMallocHost(reinterpret_cast<void**>(&staging_), kStagingBytes), "pinned staging");
  for (cudaEvent_t& event : staging_events_) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "CUDA event");
  }
  for (Download& download : downloads_) {
    check(cudaEventCreateWithFlags(&download.done, cudaEventDisableTiming), "CUDA event");
  }
}

Context::~Context() {
  cudaStreamSynchronize(stream());
  ring_.reset();
  drop_scratch();
  counters_.reset();
  prefill_queue_.reset();
  decode_queues_.reset();
  for (cudaEvent_t event : staging_events_) cudaEventDestroy(event);
  for (const Download& download : downloads_) {
    cudaEventDestroy(download.done);
    cudaFreeHost(download.pinned);
  }
  cudaFreeHost(staging_);
}

int64_t Context::device_bytes_in_use() const {
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "device memory");
  return static_cast<int64_t>(total_bytes - free_bytes) - used_by_others_;
}

int64_t Context::device_peak_bytes() const {
  return std::max(allocator_.device_peak_bytes() - used_by_others_, device_bytes_in_use());
}

void Context::force_portable() {
  portable_ = true;
  library_ = std::make_unique<LibraryProducts>(false);
}

bool Context::is_recording() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream(), &status), "CUDA stream");
  return status != cudaStreamCaptureStatusNone;
}

void Context::require_running(std::string_view what) const {
  if (is_recording()) fail(what, "cannot be had while calls are recorded");
}

void* Context::scratch(ScratchSlot slot, int64_t num_bytes) {
  if (scratch_[slot].mapped < num_bytes) require_running("CUDA workspace");
  return allocator_.grow(scratch_[slot], num_bytes, "CUDA workspace");
}

void Context::drop_scratch() {
  for (Arena::Range& range : scratch_) allocator_.drop(range);
}

void Context::copy(const void* from, void* to, int64_t num_bytes, cudaMemcpyKind kind,
                   std::string_view what) {
  const auto is_whole = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 4 == 0; };
  if (num_bytes > 0 && num_bytes <= kSmallCopy && num_bytes % 4 == 0 && is_whole(from) &&
      is_whole(to)) {
    return copy_words(*this, from, to, num_bytes / 4);
  }
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), kind, stream()), what);
}

void Context::upload(const void* host, void* device, int64_t num_bytes) {
  if (num_bytes == 0) return;
  require_running("an upload");
  if (num_bytes > kHalf) {
    const auto* bytes = static_cast<const uint8_t*>(host);
    return upload_pieces(device, num_bytes, [bytes](int64_t offset, std::span<uint8_t> to) {
      std::memcpy(to.data(), bytes + offset, to.size());
    });
  }
  const int64_t padded = (num_bytes + 255) / 256 * 256;
  int64_t begin = staging_used_ % kStagingBytes;
  if (begin / kHalf != (begin + padded - 1) / kHalf) {  // the next half, once its copies are done
    const int64_t next = (begin / kHalf + 1) % 2;
    check(cudaEventRecord(staging_events_[begin / kHalf], stream()), "upload");
    check(cudaEventSynchronize(staging_events_[next]), "upload");
    begin = next * kHalf;
  }
  std::memcpy(staging_ + begin, host, static_cast<size_t>(num_bytes));
  copy(staging_ + begin, device, num_bytes, cudaMemcpyHostToDevice, "upload");
  staging_used_ = begin + padded;
  if (staging_used_ % kHalf == 0) {  // this half is full to the brim
    const int64_t next = staging_used_ / kHalf % 2;
    check(cudaEventRecord(staging_events_[1 - next], stream()), "upload");
    check(cudaEventSynchronize(staging_events_[next]), "upload");
  }
}

void Context::upload_pieces(void* device, int64_t num_bytes, const ops::Backend::ReadPiece& read) {
  if (num_bytes == 0) return;
  if (ring_ == nullptr) ring_ = std::make_unique<UploadRing>(device_);
  ring_->upload(stream(), device, num_bytes, read);
}

void Context::download(const void* device, void* host, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check(cudaMemcpyAsync(host, device, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost,
                        stream()),
        "download");
  synchronize();
}

int64_t Context::begin_download(const void* device, int64_t num_bytes) {
  require_running("a download");
  const int64_t ticket = num_downloads_++;
  Download& download = downloads_[static_cast<size_t>(ticket % ops::Backend::kMaxDownloads)];
  check(cudaEventSynchronize(download.done), "download");  // what is forgotten may still be copied
  if (download.capacity < num_bytes) {
    check(cudaFreeHost(download.pinned), "download");
    download.pinned = nullptr;
    download.capacity = 0;
    check(
        cudaMallocHost(reinterpret_cast<void**>(&download.pinned), static_cast<size_t>(num_bytes)),
        "pinned memory");
    download.capacity = num_bytes;
  }
  download.num_bytes = num_bytes;
  copy(device, download.pinned, num_bytes, cudaMemcpyDeviceToHost, "download");
  check(cudaEventRecord(download.done, stream()), "download");
  return ticket;
}

void Context::end_download(int64_t ticket, void* host) {
  OCTET_ASSERT(ticket < num_downloads_ && ticket >= num_downloads_ - ops::Backend::kMaxDownloads);
  const Download& download = downloads_[static_cast<size_t>(ticket % ops::Backend::kMaxDownloads)];
  check(cudaEventSynchronize(download.done), "download");
  std::memcpy(host, download.pinned, static_cast<size_t>(download.num_bytes));
}

void Context::fill_zero(void* device, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check(cudaMemsetAsync(device, 0, static_cast<size_t>(num_bytes), stream()), "fill_zero");
}

void Context::synchronize() {
  require_running("the end of the work");
  check(cudaStreamSynchronize(stream()), "CUDA stream");
}

double Context::time_seconds(const std::function<void()>& body, int repeats) {
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "timing");
  check(cudaEventRecord(events[0], stream()), "timing");
  for (int i = 0; i < repeats; ++i) body();
  check(cudaEventRecord(events[1], stream()), "timing");
  check(cudaEventSynchronize(events[1]), "timing");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, events[0], events[1]), "timing");
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  return 1e-3 * milliseconds / repeats;
}

}  // namespace octet::cuda
