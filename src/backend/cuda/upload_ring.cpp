#include "backend/cuda/upload_ring.h"

#include <algorithm>
#include <thread>

#include "backend/cuda/status.h"

namespace octet::cuda {
namespace {

int num_threads() { return std::min(UploadRing::kMaxThreads, ThreadPool(0).num_threads()); }

}  // namespace

UploadRing::UploadRing(int device)
    : device_(device),
      pool_(num_threads()),
      pieces_(static_cast<size_t>(pool_.num_threads())),
      turn_(pieces_.size(), 0) {
  const auto bytes = pieces_.size() * kPiecesPerThread * size_t{kPieceBytes};
  check(cudaMallocHost(reinterpret_cast<void**>(&pinned_), bytes), "pinned staging");
  uint8_t* next = pinned_;
  for (auto& own : pieces_) {
    for (Piece& piece : own) {
      piece.data = next;
      next += kPieceBytes;
      check(cudaEventCreateWithFlags(&piece.sent, cudaEventDisableTiming), "CUDA event");
    }
  }
}

UploadRing::~UploadRing() {
  for (auto& own : pieces_) {
    for (Piece& piece : own) {
      cudaEventSynchronize(piece.sent);
      cudaEventDestroy(piece.sent);
    }
  }
  cudaFreeHost(pinned_);
}

void UploadRing::upload(cudaStream_t stream, void* device, int64_t num_bytes,
                        const ops::Backend::ReadPiece& read) {
  const auto send = [&](int64_t begin, int64_t end, int thread) {
    check(cudaSetDevice(device_), "upload");  // of this thread
    const auto own = static_cast<size_t>(thread);
    const Piece& piece = pieces_[own][static_cast<size_t>(turn_[own])];
    turn_[own] = (turn_[own] + 1) % kPiecesPerThread;
    check(cudaEventSynchronize(piece.sent), "upload");
    const auto count = static_cast<size_t>(end - begin);
    read(begin, {piece.data, count});
    check(cudaMemcpyAsync(static_cast<uint8_t*>(device) + begin, piece.data, count,
                          cudaMemcpyHostToDevice, stream),
          "upload");
    check(cudaEventRecord(piece.sent, stream), "upload");
  };
  pool_.parallel_for(num_bytes, kPieceBytes, send);
}

}  // namespace octet::cuda
