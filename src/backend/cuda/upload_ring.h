// Uploads of large arrays: several threads fill pinned pieces while earlier ones are on their way.
// One thread copies about 10 GB/s, a PCIe 5 link takes five times that.
#pragma once

#include <array>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "ops/backend.h"

namespace octet::cuda {

class UploadRing {
 public:
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;
  static constexpr int kMaxThreads = 16;
  static constexpr int kPiecesPerThread = 2;  // one is filled while the other is sent

  explicit UploadRing(int device);
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  // As ops::Backend::upload_pieces says; the copies are queued on the stream.
  void upload(cudaStream_t stream, void* device, int64_t num_bytes,
              const ops::Backend::ReadPiece& read);

 private:
  struct Piece {
    uint8_t* data = nullptr;
    cudaEvent_t sent = nullptr;  // the end of its last copy
  };

  int device_;
  ThreadPool pool_;
  uint8_t* pinned_ = nullptr;
  std::vector<std::array<Piece, kPiecesPerThread>> pieces_;  // by thread
  std::vector<int> turn_;                                    // by thread
};

}  // namespace octet::cuda
