#include "bench/attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "bench/device_limits.h"
#include "bench/operands.h"

namespace octet::bench {
namespace {

using tensor::DType;
using tensor::TensorView;

// Bytes that the calls of one round read: past a GPU's caches, and past a core's of a CPU.
constexpr double kPastCaches = 256e6, kPastCachesOfSlow = 32e6;

double token_bytes(const AttentionHeads& heads, bool fp8) {
  const int64_t head = fp8 ? heads.width + 4 : 2 * heads.width;  // codes and a scale
  return 2.0 * static_cast<double>(heads.key_value * head);
}

// Random keys and values in every slot.
void fill(ops::Backend& backend, Operands& operands, const AttentionHeads& heads,
          const ops::KvCacheView& cache, int64_t num_slots) {
  constexpr int64_t kPiece = 4096;  // tokens
  const TensorView k = operands.random({kPiece, heads.key_value, heads.width});
  std::vector<int32_t> slots(kPiece);
  const TensorView slots_view = operands.integers(slots);
  for (int64_t begin = 0; begin < num_slots; begin += kPiece) {
    for (int64_t i = 0; i < kPiece; ++i) {
      const int64_t slot = begin + i;
      slots[static_cast<size_t>(i)] = slot < num_slots ? static_cast<int32_t>(slot) : -1;
    }
    backend.upload(slots.data(), slots_view);
    backend.kv_append({.k = k, .v = k, .slots = slots_view, .cache = cache});
  }
}

// The pages of one call's sequences, [S, max_pages], off the list `pages` from `next` on.
std::vector<int32_t> page_table(const AttentionCase& shape, int64_t per_sequence, int64_t shared,
                                const std::vector<int32_t>& pages, size_t& next) {
  std::vector<int32_t> table;
  for (int64_t s = 0; s < shape.sequences; ++s) {
    for (int64_t i = 0; i < per_sequence; ++i) {
      const bool as_before = s % shape.group > 0 && i < shared;
      table.push_back(as_before ? table[table.size() - static_cast<size_t>(per_sequence)]
                                : pages[next++]);
    }
  }
  return table;
}

}  // namespace

std::vector<AttentionCase> attention_cases(const DeviceLimits& limits) {
  std::vector<AttentionCase> cases;
  const auto decode = [&](const std::vector<int64_t>& counts,
                          const std::vector<int64_t>& contexts) {
    for (const int64_t sequences : counts) {
      for (const int64_t context : contexts) {
        cases.push_back({.sequences = sequences, .context = context});
      }
    }
  };
  if (limits.slow()) {
    decode({1, 4, 16}, {500, 1000});
    cases.push_back({.sequences = 4, .context = 756, .group = 4, .shared = 512});
    cases.push_back({.sequences = 2, .new_tokens = 128, .context = 128});
    cases.push_back({.sequences = 1, .new_tokens = 512, .context = 512});
    return cases;
  }
  decode({1, 16, 64, 256}, {500, 1000, 2000});
  // 16 prompts of 1,008 tokens (whole pages) with 16 samples each, halfway through 1,000 new ones.
  cases.push_back({.sequences = 256, .context = 1508, .group = 16, .shared = 1008});
  cases.push_back({.sequences = 32, .new_tokens = 512, .context = 512});
  cases.push_back({.sequences = 8, .new_tokens = 1024, .context = 1024});
  cases.push_back({.sequences = 2, .new_tokens = 4096, .context = 4096});
  return cases;
}

AttentionRow measure_attention(ops::Backend& backend, const AttentionHeads& heads,
                               const AttentionCase& shape, const AttentionPages& kind,
                               const DeviceLimits& limits) {
  const int64_t groups = (shape.sequences + shape.group - 1) / shape.group;
  const int64_t pages_each = (shape.context + kind.page_size - 1) / kind.page_size;
  const int64_t shared_pages = shape.shared / kind.page_size;
  const int64_t num_pages = shape.sequences * (pages_each - shared_pages) + groups * shared_pages;
  AttentionRow row{.shape = shape, .fp8 = kind.fp8};
  const int64_t num_tokens =
      shape.sequences * shape.context - (shape.sequences - groups) * shared_pages * kind.page_size;
  row.bytes = token_bytes(heads, kind.fp8) * static_cast<double>(num_tokens);
  // A query at position p sees p + 1 keys.
  const int64_t first = shape.context - shape.new_tokens;
  const double pairs = static_cast<double>(shape.sequences) *
                       static_cast<double>((first + 1 + shape.context) * shape.new_tokens) / 2;
  row.flops = 4 * pairs * static_cast<double>(heads.query * heads.width);

  const double past_caches = limits.slow() ? kPastCachesOfSlow : kPastCaches;
  const auto calls =
      static_cast<int64_t>(std::clamp(std::ceil(past_caches / row.bytes), 1.0, 256.0));
  Operands operands(backend);
  const ops::KvCacheView cache = kind.make(calls * num_pages);
  fill(backend, operands, heads, cache, calls * num_pages * kind.page_size);
  std::vector<int32_t> pages(static_cast<size_t>(calls * num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  RandomSequence random({.seed = 1}, RngUse::kShuffle);
  for (size_t i = pages.size(); i > 1; --i) {
    std::swap(pages[i - 1], pages[random.next_below(static_cast<uint32_t>(i))]);
  }

  std::vector<int32_t> offsets, contexts, firsts;
  for (int64_t s = 0; s < shape.sequences; ++s) {
    offsets.push_back(static_cast<int32_t>(s * shape.new_tokens));
    contexts.push_back(static_cast<int32_t>(shape.context));
    firsts.push_back(static_cast<int32_t>(s - s % shape.group));
  }
  offsets.push_back(static_cast<int32_t>(shape.sequences * shape.new_tokens));
  const tensor::Shape queries{shape.sequences * shape.new_tokens, heads.query, heads.width};
  ops::AttentionArgs args;
  args.q = operands.random(queries);
  args.cache = cache;
  args.out = operands.zeros(DType::kBF16, queries);
  args.scale = 1 / std::sqrt(static_cast<float>(heads.width));
  args.batch.query_offsets = operands.integers(offsets);
  args.batch.context_lengths = operands.integers(contexts);
  args.batch.max_query_tokens = args.batch.min_query_tokens = shape.new_tokens;
  args.batch.max_context = shape.context;
  if (shared_pages > 0) {
    args.batch.shared_first = operands.integers(firsts);
    args.batch.shared_pages =
        operands.integers(std::vector<int32_t>(firsts.size(), static_cast<int32_t>(shared_pages)));
    args.batch.max_shared_pages = shared_pages;
  }
  std::vector<TensorView> tables;
  size_t next = 0;
  for (int64_t call = 0; call < calls; ++call) {
    tables.push_back(operands.integers(page_table(shape, pages_each, shared_pages, pages, next))
                         .reshaped({shape.sequences, pages_each}));
  }
  std::unique_ptr<ops::Recording> recording;
  const auto round = [&] {
    for (const TensorView& table : tables) {
      args.batch.page_table = table;
      backend.attention(args);
    }
  };
  round();  // workspaces grow before anything is recorded
  row.seconds = best_seconds(backend, [&] { backend.run_recorded(recording, round); }) /
                static_cast<double>(calls);
  return row;
}

}  // namespace octet::bench
