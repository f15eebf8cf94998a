// Attention against float64, and its rows' independence of everything but their own sequence.
#include <cmath>
#include <tuple>

#include "base/error.h"
#include "parity/cuda/cuda_test.h"
#include "parity/ops/attention_problem.h"

namespace octet::parity {
namespace {

class AttentionCuda : public CudaTest {
 protected:
  // FP8 products (device/attention_codes.cuh) cut each of a score's 2 × width addends 13 bits below
  // the largest: by chance √(2 width) × 2^-13 of that, which here is below 4 √width = 4 / scale.
  static double lse_tolerance(const AttentionProblem& p) {
    const bool codes =
        p.cache == DType::kE4M3 && (p.width == 64 || p.width == 128) && p.heads / p.kv_heads <= 16;
    return codes ? 4 * std::sqrt(2.0 * static_cast<double>(p.width)) * 0x1p-13 : 2e-5;
  }
  void check_forward(const AttentionProblem& p, const std::vector<int64_t>& lengths) {
    std::vector<AttentionSequence> sequences;
    for (size_t i = 0; i < lengths.size(); ++i) {
      sequences.push_back(make_sequence(p, lengths[i], 100 * static_cast<uint32_t>(i + 1)));
    }
    const AttentionRun run = run_attention(gpu(), p, sequences, {whole(sequences)}, 7);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const AttentionReference expected =
          reference_attention(p, run.cache, s, lengths[s], sequences[s].q.values());
      const std::string what = fmt::format(
          "heads {}/{} width {} page {} window {} cache {} length {}", p.heads, p.kv_heads, p.width,
          p.page_size, p.window, tensor::dtype_name(p.cache), lengths[s]);
      // Weights are rounded to BF16 (2^-9 each) before they meet the values.
      expect_near(run.rows[s].out, expected.out, {6e-3, 0x1p-7}, what);
      expect_near(run.rows[s].lse, expected.lse, {lse_tolerance(p), 1e-5}, what + " lse");
    }
  }
};

AttentionProblem problem(DType cache) { return {.dtype = DType::kBF16, .cache = cache}; }

TEST_F(AttentionCuda, ForwardEqualsFloat64) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t width : {16, 64, 80, 96, 128, 256}) {
      AttentionProblem p = problem(cache);
      p.width = width;
      check_forward(p, {1, 7, 17, 129, 300});
      p.page_size = 64;
      check_forward(p, {1, 7, 17, 129});
    }
    for (const int64_t kv_heads : {1, 3}) {
      for (const int64_t group : {1, 2, 3, 5, 8, 16, 20}) {
        AttentionProblem p = problem(cache);
        p.kv_heads = kv_heads;
        p.heads = kv_heads * group;
        check_forward(p, {70, 3, 1});
      }
    }
    for (const int64_t window : {1, 8, 64, 65, 1000}) {
      AttentionProblem p = problem(cache);
      p.window = window;
      check_forward(p, {32, 200, 600});
    }
  }
}

// One sequence among others, in one go, in chunks, token by token, on shuffled pages: the same
// bytes.
TEST_F(AttentionCuda, RowsDependOnTheirSequenceAlone) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t window : {0, 8, 277}) {
      for (const int64_t width : {64, 128}) {
        AttentionProblem p = problem(cache);
        p.heads = 8;
        p.window = window;
        p.width = width;
        constexpr int64_t kLength = 600;
        std::vector<AttentionSequence> alone;
        alone.push_back(make_sequence(p, kLength, 1));
        const AttentionRows expected = run_attention(gpu(), p, alone, {whole(alone)}).rows[0];
        for (const int64_t chunk : {1, 3, 40, 64, 149, 256}) {
          std::vector<std::vector<AttentionPart>> steps;
          for (int64_t done = 0; done < kLength; done += chunk) {
            steps.push_back({{0, std::min<int64_t>(chunk, kLength - done)}});
          }
          EXPECT_TRUE(run_attention(gpu(), p, alone, steps, 5).rows[0] == expected)
              << "chunk " << chunk << " window " << window << " width " << width;
        }
        std::vector<AttentionSequence> sequences;
        for (int64_t s = 0; s < 5; ++s) {
          sequences.push_back(make_sequence(p, 1 + 63 * s, 50 + static_cast<uint32_t>(s)));
        }
        sequences.push_back(make_sequence(p, kLength, 1));
        EXPECT_TRUE(run_attention(gpu(), p, sequences, {whole(sequences)}, 9).rows[5] == expected);
        // The others prefilled while this one decodes.
        std::vector<std::vector<AttentionPart>> steps(1, {{5, 570}});
        steps.push_back({{0, 1}, {1, 64}, {2, 127}, {5, 1}, {3, 190}, {4, 253}});
        for (int i = 0; i < 29; ++i) steps.push_back({{5, 1}});
        EXPECT_TRUE(run_attention(gpu(), p, sequences, steps, 11).rows[5] == expected);
      }
    }
  }
}

// Many new tokens at once, all sequences in one call, against one token a step: the same bytes, at
// odd lengths, for heads of a group that do and do not fill a block's rows, beside windows.
TEST_F(AttentionCuda, ManyTokensEqualDecoding) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t width : {64, 128}) {
      for (const auto& [group, window, page_size] :
           {std::tuple<int64_t, int64_t, int64_t>{1, 0, 16},
            {4, 0, 8},
            {4, 65, 16},
            {7, 0, 64},
            {8, 100, 128},
            {16, 0, 16}}) {
        if (cache == DType::kE4M3 && page_size % ops::kValueBlock != 0) continue;
        AttentionProblem p = problem(cache);
        p.kv_heads = 2;
        p.heads = 2 * group;
        p.width = width;
        p.window = window;
        p.page_size = page_size;
        std::vector<AttentionSequence> sequences;
        int64_t longest = 0;
        for (const int64_t length : {64, 1, 2, 63, 129, 65, 290}) {
          sequences.push_back(make_sequence(p, length, static_cast<uint32_t>(7 * length)));
          longest = std::max(longest, length);
        }
        std::vector<std::vector<AttentionPart>> one_by_one, uneven(2);
        for (int64_t i = 0; i < longest; ++i) {
          one_by_one.emplace_back();
          for (size_t s = 0; s < sequences.size(); ++s) {
            if (i < sequences[s].length) one_by_one.back().push_back({s, 1});
          }
        }
        for (size_t s = 0; s < sequences.size(); ++s) {
          const int64_t first = (sequences[s].length * static_cast<int64_t>(s + 1) + 4) / 9;
          if (first > 0) uneven[0].push_back({s, first});
          uneven[1].push_back({s, sequences[s].length - first});
        }
        const auto decoded = run_attention(gpu(), p, sequences, one_by_one, 3).rows;
        const std::string what = fmt::format("cache {} width {} group {} window {}",
                                             tensor::dtype_name(cache), width, group, window);
        EXPECT_TRUE(run_attention(gpu(), p, sequences, {whole(sequences)}, 5).rows == decoded)
            << what;
        EXPECT_TRUE(run_attention(gpu(), p, sequences, uneven).rows == decoded) << what;
      }
    }
  }
}

// Many decoding sequences, some of which begin with the same pages: read once or not, quantised in
// the same pass or afterwards, the same bytes. A sequence without keys gives zeros.
TEST_F(AttentionCuda, SharedPagesAndQuantisingChangeNoByte) {
  constexpr int64_t kPages = 300, kTablePages = 100;
  struct Case {
    int64_t heads, kv_heads, width, sequences;
    uint32_t run;  // sequences that begin alike, about
  };
  for (const DType cache : {DType::kE4M3, DType::kBF16}) {
    for (const auto& [heads, kv_heads, width, num_sequences, run_length] :
         {Case{8, 2, 128, 70, 9}, Case{6, 2, 64, 70, 9}, Case{10, 2, 128, 70, 9},
          Case{4, 1, 80, 70, 9}, Case{2, 2, 64, 300, 150}, Case{2, 2, 128, 200, 20},
          Case{8, 2, 128, 300, 40}, Case{14, 2, 64, 100, 40}, Case{16, 2, 128, 100, 3},
          Case{26, 2, 128, 60, 20}, Case{32, 2, 64, 60, 20}, Case{32, 8, 128, 200, 20}}) {
      const Shape pages{kPages, kv_heads, 16, width};
      Array k(cache, pages), v(cache, pages);
      Array k_scale, v_scale;
      if (cache == DType::kE4M3) {
        k_scale = Array(DType::kF32, Shape{kPages, kv_heads, 16});
        v_scale = Array(DType::kF32, Shape{kPages, kv_heads, 16});
      }
      std::vector<int32_t> slots(static_cast<size_t>(kPages * 16));
      for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
      const Array new_k = random_array(DType::kBF16, Shape{kPages * 16, kv_heads, width}, 1);
      const Array new_v = random_array(DType::kBF16, Shape{kPages * 16, kv_heads, width}, 2);
      gpu().kv_append({new_k, new_v, Array(slots), {k, v, k_scale, v_scale}});

      RandomSequence random({.seed = 4}, RngUse::kShuffle);
      std::vector<int32_t> offsets{0}, lengths, shared, firsts;
      Array table(DType::kI32, Shape{num_sequences, kTablePages});
      for (int64_t s = 0; s < num_sequences; ++s) {
        // Runs of neighbours share 0 … 60 pages.
        const bool leads = s == 0 || s + 1 == num_sequences || random.next_below(run_length) == 0;
        firsts.push_back(leads ? static_cast<int32_t>(s) : firsts.back());
        shared.push_back(leads ? static_cast<int32_t>(random.next_below(61)) : shared.back());
        for (int64_t i = 0; i < kTablePages; ++i) {
          const int64_t at = s * kTablePages + i;
          table.set(at, !leads && i < shared.back()
                            ? table.get(at - kTablePages)
                            : static_cast<double>(random.next_below(kPages)));
        }
        lengths.push_back(static_cast<int32_t>(16 * shared.back() + 1 +
                                               random.next_below(s % 3 == 0 ? 20 : 600)));
        offsets.push_back(static_cast<int32_t>(s + 1));
      }
      lengths.back() = 0;
      shared.back() = 0;
      const Array q = random_array(DType::kBF16, Shape{num_sequences, heads, width}, 3);
      const Array offsets_array(offsets), lengths_array(lengths);
      const Array firsts_array(firsts), shared_array(shared);
      const int64_t columns = heads * width;
      for (const tensor::Granularity granularity :
           {tensor::Granularity::kRow, tensor::Granularity::kRowBlock}) {
        struct Result {
          Array out, lse, codes, scales;
        };
        const auto run = [&](bool share, bool fuse) {
          Result r{Array(DType::kBF16, Shape{num_sequences, heads, width}),
                   Array(DType::kF32, Shape{num_sequences, heads}),
                   Array(DType::kE4M3, Shape{num_sequences, columns}),
                   Array(DType::kF32, tensor::scale_shape(granularity, num_sequences, columns))};
          ops::AttentionArgs args{.q = q,
                                  .cache = {k, v, k_scale, v_scale},
                                  .batch = {offsets_array, lengths_array, table, 1, 1600},
                                  .out = r.out,
                                  .lse = r.lse,
                                  .scale = 0.1f};
          if (share) {
            args.batch.shared_first = firsts_array;
            args.batch.shared_pages = shared_array;
            args.batch.max_shared_pages = 60;
          }
          const ops::QuantizedOutput output{.out = {r.codes, r.scales, granularity}};
          if (fuse) args.quantized = output;
          gpu().attention(args);
          if (!fuse) {
            gpu().quantize({.x = r.out.view().reshaped(Shape{num_sequences, columns}),
                            .column_scale = {},
                            .out = output.out});
          }
          return r;
        };
        gpu().take_quantize_counters();
        const Result plain = run(false, false);
        const ops::QuantizeCounters counters = gpu().take_quantize_counters();
        const Result fused = run(false, true);
        EXPECT_EQ(gpu().take_quantize_counters().elements, counters.elements);
        const Result both = run(true, true);
        for (const Result* r : {&fused, &both}) {
          const std::string what =
              fmt::format("{} width {} shared {}", tensor::dtype_name(cache), width, r == &both);
          EXPECT_TRUE(r->out.bytes() == plain.out.bytes()) << what;
          EXPECT_TRUE(r->lse.bytes() == plain.lse.bytes()) << what;
          EXPECT_TRUE(r->codes.bytes() == plain.codes.bytes()) << what;
          EXPECT_TRUE(r->scales.bytes() == plain.scales.bytes()) << what;
        }
        for (int64_t i = 0; i < columns; ++i) {
          ASSERT_EQ(plain.out.get((num_sequences - 1) * columns + i), 0);
        }
      }
    }
  }
}

TEST_F(AttentionCuda, NanReachesWhomItMay) {
  for (const DType cache : {DType::kE4M3, DType::kBF16}) {
    for (const int64_t width : {32, 64, 80, 128, 256}) {
      for (const int64_t window : {0, 20}) {
        for (const int64_t heads : {4, 40}) {
          AttentionProblem p = problem(cache);
          p.width = width;
          p.window = window;
          p.heads = heads;
          check_nan_reaches_whom_it_may(gpu(), p);
        }
      }
    }
  }
}

// Hopper's kernels and those of every device; groups of heads and pages that go by decoding's
// chunks, and that do not.
TEST_F(AttentionCuda, UnseenValuesCountForNothing) {
  for (ops::Backend* backend : {&gpu(), &portable_gpu()}) {
    for (const auto& [width, group, page_size] : {std::tuple<int64_t, int64_t, int64_t>{64, 4, 16},
                                                  {64, 20, 32},
                                                  {80, 4, 16},
                                                  {128, 4, 16},
                                                  {128, 20, 32},
                                                  {256, 4, 16}}) {
      for (const int64_t window : {0, 100}) {
        AttentionProblem p = problem(DType::kBF16);
        p.width = width;
        p.window = window;
        p.heads = 2 * group;
        p.page_size = page_size;
        check_unseen_values_count_for_nothing(*backend, p);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(AttentionCuda, InfinityStays) {
  for (const int64_t width : {32, 64, 80, 128, 256}) {
    AttentionProblem p = problem(DType::kBF16);
    p.width = width;
    check_infinity_stays(gpu(), p);
  }
}

TEST_F(AttentionCuda, PagesOfCodesHaveWholeBlocks) {
  AttentionProblem p = problem(DType::kE4M3);
  p.page_size = 8;
  std::vector<AttentionSequence> sequences;
  sequences.push_back(make_sequence(p, 20, 1));
  EXPECT_THROW(run_attention(gpu(), p, sequences, {whole(sequences)}), Error);
}

// More sequences than one launch takes, against the same in two calls, which read pages in common
// once: a whole chunk, and a page more.
TEST_F(AttentionCuda, ManySequencesEqualFew) {
  constexpr int64_t kPages = 300, kSequences = 1800, kTablePages = 20, kHalf = kSequences / 2;
  constexpr int64_t kHeads = 4, kWidth = 128;
  const Shape pages{kPages, 1, 16, kWidth}, scales{kPages, 1, 16};
  Array k(DType::kE4M3, pages), v(DType::kE4M3, pages);
  Array k_scale(DType::kF32, scales), v_scale(DType::kF32, scales);
  std::vector<int32_t> slots(static_cast<size_t>(kPages * 16));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  const Array new_k = random_array(DType::kBF16, Shape{kPages * 16, 1, kWidth}, 1);
  const Array new_v = random_array(DType::kBF16, Shape{kPages * 16, 1, kWidth}, 2);
  gpu().kv_append({new_k, new_v, Array(slots), {k, v, k_scale, v_scale}});
  const Array q = random_array(DType::kBF16, Shape{kSequences, kHeads, kWidth}, 3);
  Array out(DType::kBF16, Shape{kSequences, kHeads, kWidth});
  const auto attend = [&](int64_t begin, int64_t end, int32_t shared_pages) {
    RandomSequence random({.seed = 4}, RngUse::kShuffle);
    std::vector<int32_t> offsets{0}, lengths, firsts, shared;
    Array table(DType::kI32, Shape{end - begin, kTablePages});
    for (int64_t s = 0; s < kSequences; ++s) {
      const auto length = static_cast<int32_t>(273 + random.next_below(44));
      const bool inside = s >= begin && s < end;
      for (int64_t i = 0; i < kTablePages; ++i) {  // runs of 30 sequences
        const double page = i < shared_pages ? static_cast<double>((s / 30 * 7 + i) % kPages)
                                             : static_cast<double>(random.next_below(kPages));
        if (inside) table.set((s - begin) * kTablePages + i, page);
      }
      if (!inside) continue;
      lengths.push_back(length);
      offsets.push_back(static_cast<int32_t>(lengths.size()));
      firsts.push_back(static_cast<int32_t>(s / 30 * 30 - begin));
      shared.push_back(shared_pages);
    }
    const Array offsets_array(offsets), lengths_array(lengths);
    const Array firsts_array(firsts), shared_array(shared);
    const TensorView rows = q.view().slice_rows(begin, end - begin),
                     results = out.view().slice_rows(begin, end - begin);
    gpu().attention({.q = rows,
                     .cache = {k, v, k_scale, v_scale},
                     .batch = {offsets_array, lengths_array, table, 1, 320, firsts_array,
                               shared_array, shared_pages},
                     .out = results,
                     .lse = {},
                     .scale = 0.1f});
  };
  for (const int32_t shared_pages : {16, 17}) {
    attend(0, kHalf, shared_pages);
    attend(kHalf, kSequences, shared_pages);
    const std::vector<char> few = out.bytes();
    attend(0, kSequences, shared_pages);
    EXPECT_TRUE(out.bytes() == few) << shared_pages;
  }
}

TEST_F(AttentionCuda, NoContextGivesZeros) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t heads : {4, 40}) {  // a group of 20 takes the other kernel
      AttentionProblem p = problem(cache);
      p.heads = heads;
      check_fillers(gpu(), p);
      p.window = 8;
      check_fillers(gpu(), p);
    }
  }
}

TEST_F(AttentionCuda, BackwardEqualsTheOracle) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t width : {32, 128, 256}) {
      for (const int64_t window : {0, 50}) {
        AttentionProblem p = problem(cache);
        p.width = width;
        p.window = window;
        std::vector<AttentionSequence> sequences;
        for (const int64_t length : {1, 40, 190}) {
          sequences.push_back(make_sequence(p, length, static_cast<uint32_t>(length)));
        }
        const AttentionRun run = run_attention(cpu(), p, sequences, {whole(sequences)}, 3);
        constexpr int64_t kTokens = 231;
        const Shape q_shape{kTokens, p.heads, width}, k_shape{kTokens, p.kv_heads, width};
        std::vector<double> q, out, lse;
        std::vector<int32_t> offsets{0}, lengths;
        Array table(DType::kI32, Shape{3, run.cache.max_pages()});
        for (size_t s = 0; s < 3; ++s) {
          const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
            to.insert(to.end(), from.begin(), from.end());
          };
          append(q, sequences[s].q.values());
          append(out, run.rows[s].out);
          append(lse, run.rows[s].lse);
          lengths.push_back(static_cast<int32_t>(sequences[s].length));
          offsets.push_back(offsets.back() + lengths.back());
          for (int64_t i = 0; i < run.cache.max_pages(); ++i) {
            table.set(static_cast<int64_t>(s) * run.cache.max_pages() + i,
                      run.cache.table(s)[static_cast<size_t>(i)]);
          }
        }
        const Array q_array(DType::kBF16, q_shape, q), out_array(DType::kBF16, q_shape, out),
            lse_array(DType::kF32, Shape{kTokens, p.heads}, lse), offsets_array(offsets),
            lengths_array(lengths), dout = random_array(DType::kBF16, q_shape, 77);
        struct Gradients {
          Array dq, dk, dv;
        } results[2];
        for (const int which : {0, 1}) {
          Gradients& g = results[which];
          g = {Array(DType::kBF16, q_shape), Array(DType::kBF16, k_shape),
               Array(DType::kBF16, k_shape)};
          (which == 0 ? cpu() : gpu())
              .attention_backward({.q = q_array,
                                   .cache = run.cache.view(),
                                   .batch = {offsets_array, lengths_array, table},
                                   .out = out_array,
                                   .lse = lse_array,
                                   .dout = dout,
                                   .dq = g.dq,
                                   .dk = g.dk,
                                   .dv = g.dv,
                                   .scale = p.scale(),
                                   .window = window});
        }
        expect_same(results[1].dq, results[0].dq, {1e-4, 0x1p-7}, "dq");
        expect_same(results[1].dk, results[0].dk, {1e-4, 0x1p-7}, "dk");
        expect_same(results[1].dv, results[0].dv, {1e-4, 0x1p-7}, "dv");
      }
    }
  }
}

TEST_F(AttentionCuda, CopiesPages) {
  for (const DType dtype : {DType::kBF16, DType::kE4M3}) {
    for (const int64_t width : {32, 18}) {
      AttentionProblem p = problem(dtype);
      p.width = width;
      std::vector<AttentionSequence> sequences;
      sequences.push_back(make_sequence(p, 300 * p.page_size, 1));
      const auto bytes_after = [&](ops::Backend& backend, std::span<const ops::KvPageCopy> copies) {
        const PagedCache cache(p, sequences, 0);
        std::string bytes;
        for (const TensorView& view :
             {cache.view().k, cache.view().v, cache.view().k_scale, cache.view().v_scale}) {
          auto* data = view.as<char>();
          for (int64_t i = 0; i < (view.empty() ? 0 : view.num_bytes()); ++i) {
            data[i] = static_cast<char>(i * 7 + i / 251);
          }
        }
        backend.kv_copy({cache.view(), copies});
        for (const TensorView& view :
             {cache.view().k, cache.view().v, cache.view().k_scale, cache.view().v_scale}) {
          if (!view.empty()) bytes.append(view.as<char>(), static_cast<size_t>(view.num_bytes()));
        }
        return bytes;
      };
      std::vector<ops::KvPageCopy> copies;  // more than one launch takes
      for (int32_t i = 0; i < 290; ++i) copies.push_back({i % 5, 10 + i, i % 17});
      const std::string copied = bytes_after(gpu(), copies);
      EXPECT_TRUE(copied == bytes_after(cpu(), copies)) << width;
      EXPECT_FALSE(copied == bytes_after(gpu(), {})) << width;
    }
  }
}

// Codes and scales of appended keys and values: bytes equal to the oracle's.
TEST_F(AttentionCuda, AppendsTheOraclesBytes) {
  for (const DType cache : {DType::kBF16, DType::kE4M3}) {
    AttentionProblem p = problem(cache);
    p.width = 80;
    std::vector<AttentionSequence> sequences;
    sequences.push_back(make_sequence(p, 37, 1));
    sequences[0].k = Array(p.dtype, Shape{37, p.kv_heads, p.width},
                           hostile_values(37 * p.kv_heads * p.width, 3));
    sequences[0].v = Array(p.dtype, Shape{37, p.kv_heads, p.width},
                           hostile_values(37 * p.kv_heads * p.width, 4));
    const AttentionRun a = run_attention(cpu(), p, sequences, {whole(sequences)});
    const AttentionRun b = run_attention(gpu(), p, sequences, {whole(sequences)});
    const auto bytes = [](const TensorView& view) {
      return std::string(view.as<char>(), static_cast<size_t>(view.num_bytes()));
    };
    EXPECT_TRUE(bytes(a.cache.view().k) == bytes(b.cache.view().k)) << tensor::dtype_name(cache);
    EXPECT_TRUE(bytes(a.cache.view().v) == bytes(b.cache.view().v)) << tensor::dtype_name(cache);
    if (cache == DType::kE4M3) {
      EXPECT_TRUE(bytes(a.cache.view().k_scale) == bytes(b.cache.view().k_scale));
      EXPECT_TRUE(bytes(a.cache.view().v_scale) == bytes(b.cache.view().v_scale));
    }
  }
}

}  // namespace
}  // namespace octet::parity
