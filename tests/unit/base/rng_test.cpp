#include "base/rng.h"

#include <cmath>

#include <gtest/gtest.h>

namespace octet {
namespace {

// Known answers of Random123's kat_vectors for philox4x32 with 10 rounds.
TEST(Philox, MeetsKnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, 0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, ~uint64_t{0}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomSequence, HasTheMomentsOfItsDistributions) {
  RandomSequence sequence({.seed = 7}, RngUse::kInit);
  double sum = 0, squares = 0;
  constexpr int kCount = 20000;
  for (int i = 0; i < kCount; ++i) {
    const double x = sequence.next_normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.03);
  EXPECT_NEAR(squares / kCount, 1, 0.04);
  int counts[3] = {};
  for (int i = 0; i < 3000; ++i) ++counts[sequence.next_below(3)];
  for (int count : counts) EXPECT_NEAR(count, 1000, 120);
}

TEST(RandomWords, DifferByUseStepPromptSampleAndPosition) {
  const RngKey key{1, 2, 3, 4};
  const auto base = random_words(key, RngUse::kSample, 5);
  EXPECT_EQ(base, random_words(key, RngUse::kSample, 5));
  EXPECT_NE(base, random_words(key, RngUse::kInit, 5));
  EXPECT_NE(base, random_words(key, RngUse::kSample, 6));
  EXPECT_NE(base, random_words({1, 2, 3, 5}, RngUse::kSample, 5));
  EXPECT_NE(base, random_words({1, 2, 4, 4}, RngUse::kSample, 5));
  EXPECT_NE(base, random_words({1, 3, 3, 4}, RngUse::kSample, 5));
  EXPECT_NE(base, random_words({2, 2, 3, 4}, RngUse::kSample, 5));
}

}  // namespace
}  // namespace octet
