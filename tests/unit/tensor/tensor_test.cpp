#include "tensor/tensor.h"

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

}  // namespace
}  // namespace octet::tensor
