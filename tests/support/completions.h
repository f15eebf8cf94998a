// Completions are equal: ids, why they end, and the bits of their log-probabilities.
#pragma once

#include <span>
#include <string>

#include "rollout/engine.h"
#include "support/tiny_policy.h"

namespace octet::rollout {

inline void expect_equal(std::span<const Completion> a, std::span<const Completion> b,
                         const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].ids, b[i].ids) << what << ", completion " << i;
    ASSERT_EQ(a[i].finish_reason, b[i].finish_reason) << what << ", completion " << i;
    test::expect_equal_bits(a[i].log_probs, b[i].log_probs, what);
  }
}

}  // namespace octet::rollout
