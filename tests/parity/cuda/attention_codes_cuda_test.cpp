// Hopper's attention over E4M3 pages where its numbers leave the usual range.
#include <cmath>

#include "parity/cuda/cuda_test.h"
#include "parity/ops/attention_problem.h"

namespace octet::parity {
namespace {

class AttentionCodesCuda : public CudaTest {};

// Values of the least scale in a chunk whose weight beside the chunk before is 2^-26 and less:
// their product is below normal numbers, but the rows are not. Prefill and decoding give the same
// bytes.
TEST_F(AttentionCodesCuda, TinyValuesOfTinyWeightKeepTheirBytes) {
  constexpr int64_t kLength = 400, kChunk = 256;
  for (const int64_t width : {64, 128}) {
    AttentionProblem p{.dtype = DType::kBF16, .cache = DType::kE4M3};
    p.heads = 8;
    p.width = width;
    std::vector<AttentionSequence> sequences;
    sequences.push_back(make_sequence(p, kLength, 1));
    AttentionSequence& s = sequences[0];
    for (int64_t i = 0; i < kLength * p.heads * width; ++i) s.q.set(i, 8 * s.q.get(i));
    for (int64_t i = 0; i < kLength * p.kv_heads * width; ++i) {
      const bool first =
          i < kChunk * p.kv_heads * width;  // large scores and no values, or reversed
      if (!first) s.k.set(i, 0);
      s.v.set(i, first ? 0 : s.v.get(i) * 0x1p-93);
    }
    const std::vector<std::vector<AttentionPart>> one_by_one(kLength, {{0, 1}});
    const AttentionRows rows = run_attention(gpu(), p, sequences, {whole(sequences)}).rows[0];
    EXPECT_TRUE(rows == run_attention(gpu(), p, sequences, one_by_one).rows[0]) << width;
    int64_t tiny = 0;
    for (const double value : rows.out) tiny += value != 0 && std::abs(value) < 0x1p-120;
    EXPECT_GT(tiny, 1000) << width;
  }
}

// A value so large that its scale overflows under the power of the tiny ones before it: rows that
// do not see it yet keep their bytes.
TEST_F(AttentionCodesCuda, AHugeValueDoesNotReachRowsBeforeIt) {
  constexpr int64_t kLength = 400, kHuge = 300;
  for (const int64_t window : {0, 100}) {
    AttentionProblem p{.dtype = DType::kBF16, .cache = DType::kE4M3};
    p.heads = 8;
    p.width = 128;
    p.window = window;
    std::vector<AttentionSequence> sequences;
    sequences.push_back(make_sequence(p, kLength, 1));
    AttentionSequence& s = sequences[0];
    for (int64_t i = 0; i < kLength * p.kv_heads * p.width; ++i) {
      const bool is_huge = i / (p.kv_heads * p.width) == kHuge;
      s.v.set(i, s.v.get(i) * (is_huge ? 0x1p100 : 0x1p-93));
    }
    const std::vector<std::vector<AttentionPart>> one_by_one(kLength, {{0, 1}});
    const AttentionRows rows = run_attention(gpu(), p, sequences, {whole(sequences)}).rows[0];
    EXPECT_TRUE(rows == run_attention(gpu(), p, sequences, one_by_one).rows[0]) << window;
    for (const double value : rows.out) ASSERT_TRUE(std::isfinite(value)) << window;
  }
}

}  // namespace
}  // namespace octet::parity
