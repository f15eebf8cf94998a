// Attention against float64, and its rows' independence of everything but their own sequence.
#include "parity/ops/attention_problem.h"

namespace octet::parity {
namespace {

class AttentionTest : public OpTest {
 protected:
  void check_forward(const AttentionProblem& p, const std::vector<int64_t>& lengths) {
    std::vector<AttentionSequence> sequences;
    for (size_t i = 0; i < lengths.size(); ++i) {
      sequences.push_back(make_sequence(p, lengths[i], 100 * static_cast<uint32_t>(i + 1)));
    }
    const AttentionRun run = run_attention(*backend_, p, sequences, {whole(sequences)}, 7);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const AttentionReference expected =
          reference_attention(p, run.cache, s, lengths[s], sequences[s].q.values());
      const std::string what =
          fmt::format("heads {}/{} width {} page {} window {} {} cache {} length {}", p.heads,
                      p.kv_heads, p.width, p.page_size, p.window, tensor::dtype_name(p.dtype),
                      tensor::dtype_name(p.cache), lengths[s]);
      expect_near(run.rows[s].out, expected.out, tolerance(Op::kAttention, p.dtype), what);
      expect_near(run.rows[s].lse, expected.lse, tolerance(Op::kAttention, DType::kF32),
                  what + " lse");
    }
  }
};

TEST_P(AttentionTest, ForwardEqualsFloat64) {
  for (const int64_t width : {2, 16, 32, 64, 80, 96, 128, 256}) {
    check_forward({.width = width}, {1, 7, 17, 129});
    check_forward({.width = width, .page_size = 64, .dtype = DType::kBF16, .cache = DType::kBF16},
                  {1, 7, 17, 129});
    check_forward({.width = width, .dtype = DType::kBF16, .cache = DType::kE4M3}, {1, 7, 129});
  }
  for (const int64_t kv_heads : {1, 2, 3}) {
    for (const int64_t group : {1, 2, 3, 5, 8}) {
      check_forward({.heads = kv_heads * group, .kv_heads = kv_heads, .width = 16}, {70, 3});
    }
  }
  for (const int64_t window : {1, 8, 64, 65, 1000}) {
    check_forward({.window = window}, {32, 200});
  }
  check_forward({.cache = DType::kE4M3}, {33});
  check_forward({.dtype = DType::kF32, .cache = DType::kBF16}, {33});
}

TEST_P(AttentionTest, NanReachesWhomItMay) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t window : {0, 20}) {
      check_nan_reaches_whom_it_may(*backend_,
                                    {.window = window, .dtype = DType::kBF16, .cache = cache});
    }
  }
}

TEST_P(AttentionTest, UnseenValuesCountForNothing) {
  for (const int64_t window : {0, 20, 100}) {
    check_unseen_values_count_for_nothing(
        *backend_, {.window = window, .dtype = DType::kBF16, .cache = DType::kBF16});
  }
}

TEST_P(AttentionTest, InfinityStays) {
  check_infinity_stays(*backend_, {.dtype = DType::kBF16, .cache = DType::kBF16});
}

// Attention over codes has the bytes of attention over what they stand for.
TEST_P(AttentionTest, CodesAreTheirValues) {
  for (const int64_t width : {2, 22, 64, 80, 250}) {
    const AttentionProblem p{.width = width, .page_size = 32, .window = 90, .cache = DType::kE4M3};
    std::vector<AttentionSequence> sequences;
    sequences.push_back(make_sequence(p, 150, 1));
    const AttentionRun coded = run_attention(*backend_, p, sequences, {whole(sequences)}, 7);
    for (int64_t i = 0; i < 150 * p.kv_heads * width; ++i) {
      const int64_t row = i / width;
      const auto value = [&](bool is_key) {
        return coded.cache.value(is_key, 0, row / p.kv_heads, row % p.kv_heads, i % width);
      };
      sequences[0].k.set(i, value(true));
      sequences[0].v.set(i, value(false));
    }
    AttentionProblem dense = p;
    dense.cache = DType::kF32;
    EXPECT_TRUE(run_attention(*backend_, dense, sequences, {whole(sequences)}).rows == coded.rows)
        << width;
  }
}

TEST_P(AttentionTest, NoContextGivesZeros) {
  for (const int64_t window : {0, 8}) {
    check_fillers(*backend_, {.window = window});
    check_fillers(*backend_, {.window = window, .dtype = DType::kBF16, .cache = DType::kE4M3});
  }
}

// One sequence among others, in one go, in chunks, token by token, on shuffled pages and on two
// threads: the same bytes.
TEST_P(AttentionTest, RowsDependOnTheirSequenceAlone) {
  const std::unique_ptr<ops::Backend> two_threads = make_backend(2);
  for (const DType cache : {DType::kBF16, DType::kF32, DType::kE4M3}) {
    for (const int64_t window : {0, 8, 77}) {
      for (const int64_t page_size : {16, 64}) {
        const AttentionProblem p{.heads = 6,
                                 .kv_heads = 2,
                                 .page_size = page_size,
                                 .window = window,
                                 .dtype = cache == DType::kF32 ? DType::kF32 : DType::kBF16,
                                 .cache = cache};
        std::vector<AttentionSequence> alone;
        alone.push_back(make_sequence(p, 150, 1));
        const AttentionRows expected = run_attention(*backend_, p, alone, {whole(alone)}).rows[0];

        for (const int64_t chunk : {1, 3, 40, 64, 149}) {
          std::vector<std::vector<AttentionPart>> steps;
          for (int64_t done = 0; done < 150; done += chunk) {
            steps.push_back({{0, std::min<int64_t>(chunk, 150 - done)}});
          }
          EXPECT_TRUE(run_attention(*backend_, p, alone, steps, 5).rows[0] == expected)
              << "chunk " << chunk << " window " << window << " page " << page_size;
        }
        for (const size_t others : {1, 3, 16}) {
          std::vector<AttentionSequence> sequences;
          for (size_t s = 0; s < others; ++s) {
            sequences.push_back(
                make_sequence(p, 1 + 13 * static_cast<int64_t>(s), 50 + static_cast<uint32_t>(s)));
          }
          sequences.push_back(make_sequence(p, 150, 1));
          for (ops::Backend* backend : {backend_.get(), two_threads.get()}) {
            EXPECT_TRUE(run_attention(*backend, p, sequences, {whole(sequences)}, 9).rows[others] ==
                        expected)
                << others << " others";
            // The others prefilled while this one decodes, then all together.
            std::vector<std::vector<AttentionPart>> steps(2);
            steps[0].push_back({others, 100});
            for (size_t s = 0; s < others; ++s) {
              steps[1].push_back({s, sequences[s].length});
              if (s == 0) steps[1].push_back({others, 1});
            }
            for (int i = 0; i < 49; ++i) steps.push_back({{others, 1}});
            EXPECT_TRUE(run_attention(*backend, p, sequences, steps, 11).rows[others] == expected)
                << others << " others, decoding";
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
