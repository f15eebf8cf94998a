// Which devices a build serves; needs none.
#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"

namespace octet::parity {
namespace {

TEST(CudaArchitectures, ServeTheirOwnDevices) {
  const auto all = [](int capability) {
    return cuda::architecture_for(capability, "89,90a,100f,120f");
  };
  EXPECT_EQ(all(89), "89");
  EXPECT_EQ(all(90), "90a");
  EXPECT_EQ(all(100), "100f");
  EXPECT_EQ(all(103), "100f");
  EXPECT_EQ(all(120), "120f");
  EXPECT_EQ(all(121), "120f");
  for (const int capability : {75, 80, 86, 87, 110}) EXPECT_EQ(all(capability), "") << capability;
  EXPECT_EQ(cuda::architecture_for(90, "90a"), "90a");
  EXPECT_EQ(cuda::architecture_for(89, "90a"), "");
}

}  // namespace
}  // namespace octet::parity
