// How fast the attention forward is: decoding over pages against the memory, prefill against the
// matrix units.
#pragma once

#include <functional>
#include <vector>

#include "bench/device_limits.h"
#include "ops/backend.h"

namespace octet::bench {

struct AttentionHeads {
  int64_t query = 32;
  int64_t key_value = 8;
  int64_t width = 128;
};

// One layer's pages as the caller has them, E4M3 or BF16.
struct AttentionPages {
  int64_t page_size = 16;
  bool fp8 = false;
  std::function<ops::KvCacheView(int64_t num_pages)> make;
};

// `sequences` of `new_tokens` each (1: decoding) at a context of `context` tokens, theirs included.
// Each `group` neighbours have the pages of their first `shared` tokens in common.
struct AttentionCase {
  int64_t sequences = 1;
  int64_t new_tokens = 1;
  int64_t context = 0;
  int64_t group = 1;
  int64_t shared = 0;
};

struct AttentionRow {
  AttentionCase shape;
  bool fp8 = false;    // pages of E4M3, otherwise BF16
  double seconds = 0;  // of one call
  double bytes = 0;    // of keys, values and scales, each page once
  double flops = 0;    // of both products over the keys that a query sees
};

// Cases that the device measures in seconds: smaller ones where it is slow.
std::vector<AttentionCase> attention_cases(const DeviceLimits& limits);

// Takes about a tenth of a second, of a slow device a second. Calls follow each other on different
// pages, so that none finds its own in a cache.
AttentionRow measure_attention(ops::Backend& backend, const AttentionHeads& heads,
                               const AttentionCase& shape, const AttentionPages& kind,
                               const DeviceLimits& limits);

}  // namespace octet::bench
