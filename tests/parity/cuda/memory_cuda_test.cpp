// Device memory: addresses that stay, exact accounting, uploads of every size.
#include <algorithm>
#include <cstring>

#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

using tensor::Buffer;
using tensor::DType;
using tensor::TensorView;

class MemoryCuda : public CudaTest {
 protected:
  static std::vector<uint8_t> pattern(int64_t num_bytes) {
    std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>((i * 2654435761u) >> 13);
    }
    return bytes;
  }
  static TensorView view(const Buffer& buffer) {
    return buffer.view(DType::kU8, {buffer.num_bytes()});
  }
  static std::vector<uint8_t> bytes_of(ops::Backend& backend, const Buffer& buffer) {
    std::vector<uint8_t> bytes(static_cast<size_t>(buffer.num_bytes()));
    backend.download(view(buffer), bytes.data());
    return bytes;
  }
  static std::unique_ptr<ops::Backend> limited(int64_t bytes) {
    return cuda::make_cuda_backend({.device = 0, .memory_limit_bytes = bytes});
  }
};

TEST_F(MemoryCuda, UnmappedBuffersComeBackZeroedWhereTheyWere) {
  const auto backend = limited(0);
  tensor::Allocator& allocator = backend->allocator();
  const int64_t page = allocator.page_bytes();
  for (const int64_t num_bytes : {int64_t{1000}, page, 3 * page + 777, 40 * page}) {
    const int64_t before = allocator.bytes_in_use();
    Buffer buffer = allocator.allocate(num_bytes, "test");
    const int64_t taken = allocator.bytes_in_use() - before;
    EXPECT_EQ(bytes_of(*backend, buffer), std::vector<uint8_t>(static_cast<size_t>(num_bytes)));
    const std::vector<uint8_t> data = pattern(num_bytes);
    backend->upload(data.data(), view(buffer));
    EXPECT_EQ(bytes_of(*backend, buffer), data);
    void* address = buffer.data();
    const int64_t measured = backend->device_bytes_in_use();
    buffer.unmap();
    const int64_t given = num_bytes >= page ? allocator.whole_pages(num_bytes) : 0;
    EXPECT_EQ(allocator.bytes_in_use(), before + taken - given);
    EXPECT_EQ(backend->device_bytes_in_use(), measured - given);
    buffer.map("test");
    EXPECT_EQ(buffer.data(), address);
    EXPECT_EQ(allocator.bytes_in_use(), before + taken);
    EXPECT_EQ(backend->device_bytes_in_use(), measured);
    EXPECT_EQ(bytes_of(*backend, buffer), std::vector<uint8_t>(static_cast<size_t>(num_bytes)));
    backend->upload(data.data(), view(buffer));
    EXPECT_EQ(bytes_of(*backend, buffer), data);
  }
}

TEST_F(MemoryCuda, TheLimitHoldsToThePage) {
  const auto backend = limited(int64_t{64} << 20);
  tensor::Allocator& allocator = backend->allocator();
  const int64_t page = allocator.page_bytes();
  const int64_t room = (int64_t{64} << 20) - allocator.bytes_in_use();
  EXPECT_THROW(allocator.allocate(room + 1, "too much"), Error);
  {
    Buffer all = allocator.allocate(room, "all");
    EXPECT_EQ(allocator.bytes_in_use(), int64_t{64} << 20);
    EXPECT_THROW(allocator.allocate(page, "a page more"), Error);
    all.unmap();
    const Buffer other = allocator.allocate(page, "a page");
    EXPECT_THROW(all.map("all"), Error);
  }
  const Buffer again = allocator.allocate(room, "all again");
  EXPECT_EQ(allocator.peak_bytes(), int64_t{64} << 20);
}

TEST_F(MemoryCuda, SmallBuffersSharePagesAndAreUsedAgain) {
  const auto backend = limited(0);
  tensor::Allocator& allocator = backend->allocator();
  const int64_t page = allocator.page_bytes(), before = allocator.bytes_in_use();
  std::vector<Buffer> buffers;
  std::vector<std::vector<uint8_t>> contents;
  for (int64_t i = 0; i < 600; ++i) {
    buffers.push_back(allocator.allocate(1 + i * 37 % 30000, "small"));
    contents.push_back(pattern(buffers.back().num_bytes()));
    backend->upload(contents.back().data(), view(buffers.back()));
  }
  const int64_t in_use = allocator.bytes_in_use();
  int64_t packed = 0;
  for (const Buffer& buffer : buffers) packed += (buffer.num_bytes() + 255) / 256 * 256;
  EXPECT_LE(in_use - before, packed + page);
  for (size_t i = 0; i < buffers.size(); i += 2) buffers[i].reset();
  for (size_t i = 0; i < buffers.size(); i += 2) {
    buffers[i] = allocator.allocate(static_cast<int64_t>(contents[i].size()), "small");
    EXPECT_EQ(bytes_of(*backend, buffers[i]), std::vector<uint8_t>(contents[i].size()));
    backend->upload(contents[i].data(), view(buffers[i]));
  }
  EXPECT_EQ(allocator.bytes_in_use(), in_use);
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_EQ(bytes_of(*backend, buffers[i]), contents[i]) << i;
  }
  buffers.clear();
  const Buffer whole = allocator.allocate(page - 256, "what they left");
  EXPECT_EQ(allocator.bytes_in_use(), in_use);
}

TEST_F(MemoryCuda, UploadsInPiecesAskForEveryByteOnceAndPassErrorsOn) {
  ops::Backend& backend = gpu_device();
  for (const int64_t num_bytes :
       {int64_t{1}, int64_t{4097}, (int64_t{2} << 20) + 3, (int64_t{90} << 20) + 4567}) {
    const Buffer buffer = backend.allocator().allocate(num_bytes, "test");
    const std::vector<uint8_t> data = pattern(num_bytes);
    for (int turn = 0; turn < 2; ++turn) {
      backend.fill_zero(view(buffer));
      if (turn == 0) {
        backend.upload_pieces(view(buffer), [&](int64_t offset, std::span<uint8_t> to) {
          std::memcpy(to.data(), data.data() + offset, to.size());
        });
      } else {
        backend.upload(data.data(), view(buffer));
      }
      EXPECT_TRUE(bytes_of(backend, buffer) == data) << num_bytes;
    }
    EXPECT_THROW(
        backend.upload_pieces(view(buffer),
                              [&](int64_t offset, std::span<uint8_t> to) {
                                if (offset + static_cast<int64_t>(to.size()) == num_bytes) {
                                  fail("test", "the last piece is missing");
                                }
                              }),
        Error);
  }
}

}  // namespace
}  // namespace octet::parity
