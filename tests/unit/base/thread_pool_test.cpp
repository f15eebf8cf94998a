#include "base/thread_pool.h"

#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace octet {
namespace {

TEST(ThreadPool, VisitsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 300; ++round) {
      std::vector<int> visits(97, 0);
      pool.parallel_for(97, 8, [&](int64_t begin, int64_t end, int thread) {
        ASSERT_LT(thread, threads);
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (int count : visits) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, RethrowsAndGoesOn) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(100, 1,
                                 [](int64_t begin, int64_t, int) {
                                   if (begin == 50) throw std::runtime_error("x");
                                 }),
               std::runtime_error);
  int64_t sum = 0;
  pool.parallel_for(1, 1, [&](int64_t, int64_t, int) { ++sum; });
  EXPECT_EQ(sum, 1);
}

}  // namespace
}  // namespace octet
