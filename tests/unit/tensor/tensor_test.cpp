#include "tensor/tensor.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "tensor/buffer.h"

namespace octet::tensor {
namespace {

TEST(TensorView, SlicesRowsAndColumns) {
  std::vector<float> data(12);
  for (int i = 0; i < 12; ++i) data[i] = static_cast<float>(i);
  const TensorView view(data.data(), DType::kF32, {3, 4});
  const TensorView columns = view.slice_columns(1, 2);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(columns.row<float>(2)[1], 10.0f);
  EXPECT_EQ(columns.reshaped({3, 1, 2}).row<float>(1)[0], 5.0f);
  EXPECT_EQ(view.slice_rows(1, 2).row<float>(1)[3], 11.0f);
  EXPECT_EQ(view.reshaped({4, 3}).row<float>(1)[0], 3.0f);
}

TEST(ScaleShape, HasTailBlocks) {
  EXPECT_EQ(scale_shape(Granularity::kBlock, 129, 257), (Shape{2, 3}));
  EXPECT_EQ(scale_shape(Granularity::kRowBlock, 5, 128), (Shape{5, 1}));
}

TEST(Allocator, AccountsAndKeepsItsLimit) {
  HostAllocator allocator(1000);
  {
    Buffer a = allocator.allocate(600, "a");
    EXPECT_EQ(allocator.bytes_in_use(), 600);
    EXPECT_THROW(allocator.allocate(500, "the KV pool"), Error);
    Buffer b = std::move(a);
    EXPECT_EQ(allocator.bytes_in_use(), 600);
    EXPECT_TRUE(a.empty());
  }
  EXPECT_EQ(allocator.bytes_in_use(), 0);
  EXPECT_EQ(allocator.peak_bytes(), 600);
  Buffer c = allocator.allocate(DType::kBF16, {10, 20}, "c");
  EXPECT_EQ(c.num_bytes(), 400);
}

// What is unmapped is not in use, keeps its address and comes back zeroed, within the limit.
TEST(Allocator, ABufferGivesItsMemoryAwayAndKeepsItsAddress) {
  for (const int64_t num_bytes : {int64_t{100}, int64_t{5000}, (int64_t{5} << 20) + 12345}) {
    HostAllocator allocator(num_bytes + 550);
    Buffer buffer = allocator.allocate(num_bytes, "pool");
    Buffer neighbour = allocator.allocate(500, "neighbour");
    auto* bytes = static_cast<uint8_t*>(buffer.data());
    std::fill(bytes, bytes + num_bytes, 7);
    std::fill_n(static_cast<uint8_t*>(neighbour.data()), 500, 9);
    buffer.unmap();
    EXPECT_TRUE(buffer.is_unmapped());
    EXPECT_EQ(allocator.bytes_in_use(), 500);
    {
      const Buffer other = allocator.allocate(num_bytes, "other");
      EXPECT_THROW(buffer.map("pool"), Error);
      EXPECT_EQ(allocator.bytes_in_use(), num_bytes + 500);
    }
    buffer.map("pool");
    EXPECT_EQ(buffer.data(), bytes);
    EXPECT_EQ(allocator.bytes_in_use(), num_bytes + 500);
    EXPECT_EQ(std::count(bytes, bytes + num_bytes, 0), num_bytes);
    EXPECT_EQ(static_cast<uint8_t*>(neighbour.data())[499], 9);
    buffer.unmap();
    Buffer moved = std::move(buffer);
    EXPECT_TRUE(moved.is_unmapped());
    moved.reset();
    EXPECT_EQ(allocator.bytes_in_use(), 500);
    EXPECT_EQ(allocator.peak_bytes(), num_bytes + 500);
  }
}

TEST(Allocator, APlanCountsWholePages) {
  PlanningAllocator plan(4096);
  std::vector<Buffer> buffers;
  for (const int64_t num_bytes : {100, 5000, 300, 4096, 3700}) {
    buffers.push_back(plan.allocate(num_bytes, num_bytes > 4000 ? "large" : "small"));
  }
  // Two pages and one for the large ones; 256 + 512 + 3840 bytes share two.
  const auto entries = plan.entries();
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].num_bytes, 256 + 512 + 3840);
  EXPECT_EQ(entries[1].num_bytes, 3 * 4096);
  EXPECT_EQ(entries[2].num_bytes, 2 * 4096 - (256 + 512 + 3840));
  EXPECT_EQ(plan.bytes_in_use(), 5 * 4096);
}

}  // namespace
}  // namespace octet::tensor
