// The gradient of attention against a float64 derivation and finite differences of the forward.
#include "base/error.h"
#include "parity/ops/attention_problem.h"

namespace octet::parity {
namespace {

struct Gradients {
  std::vector<double> dq, dk, dv;
  bool operator==(const Gradients&) const = default;
};

// All sequences in one batch; douts [length, heads, width] each.
std::vector<Gradients> gradients(ops::Backend& backend, const AttentionProblem& p,
                                 const std::vector<AttentionSequence>& sequences,
                                 const std::vector<Array>& douts, const AttentionRun& run) {
  int64_t num_tokens = 0;
  for (const AttentionSequence& s : sequences) num_tokens += s.length;
  const Shape query_shape{num_tokens, p.heads, p.width};
  const Shape key_shape{num_tokens, p.kv_heads, p.width};
  Array q(p.dtype, query_shape, p.width), out(p.dtype, query_shape), dout(p.dtype, query_shape);
  Array lse(DType::kF32, Shape{num_tokens, p.heads});
  const Array dq = random_array(p.dtype, query_shape, 7, 1, 2 * p.width);
  const Array dk = random_array(p.dtype, key_shape, 8, 1, p.width);
  const Array dv = random_array(p.dtype, key_shape, 9);
  std::vector<int32_t> offsets{0}, lengths;
  Array table(DType::kI32, Shape{static_cast<int64_t>(sequences.size()), run.cache.max_pages()});
  int64_t at = 0, lse_at = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int64_t i = 0; i < sequences[s].length * p.heads * p.width; ++i, ++at) {
      q.set(at, sequences[s].q.get(i));
      out.set(at, run.rows[s].out[static_cast<size_t>(i)]);
      dout.set(at, douts[s].get(i));
    }
    for (const double value : run.rows[s].lse) lse.set(lse_at++, value);
    offsets.push_back(offsets.back() + static_cast<int32_t>(sequences[s].length));
    lengths.push_back(static_cast<int32_t>(sequences[s].length));
    for (int64_t i = 0; i < run.cache.max_pages(); ++i) {
      table.set(static_cast<int64_t>(s) * run.cache.max_pages() + i,
                run.cache.table(s)[static_cast<size_t>(i)]);
    }
  }
  const Array offsets_array(offsets), lengths_array(lengths);
  backend.attention_backward({.q = q,
                              .cache = run.cache.view(),
                              .batch = {offsets_array, lengths_array, table},
                              .out = out,
                              .lse = lse,
                              .dout = dout,
                              .dq = dq,
                              .dk = dk,
                              .dv = dv,
                              .scale = p.scale(),
                              .window = p.window});
  std::vector<Gradients> result(sequences.size());
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t query_row = p.heads * p.width, key_row = p.kv_heads * p.width;
    for (int64_t i = offsets[s] * query_row; i < offsets[s + 1] * query_row; ++i) {
      result[s].dq.push_back(dq.get(i));
    }
    for (int64_t i = offsets[s] * key_row; i < offsets[s + 1] * key_row; ++i) {
      result[s].dk.push_back(dk.get(i));
      result[s].dv.push_back(dv.get(i));
    }
  }
  return result;
}

class AttentionBackwardTest : public OpTest {
 protected:
  void check(const AttentionProblem& p, const std::vector<int64_t>& lengths) {
    std::vector<AttentionSequence> sequences;
    std::vector<Array> douts;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto seed = 100 * static_cast<uint32_t>(i + 1);
      sequences.push_back(make_sequence(p, lengths[i], seed));
      douts.push_back(random_array(p.dtype, Shape{lengths[i], p.heads, p.width}, seed + 7));
    }
    const AttentionRun run = run_attention(*backend_, p, sequences, {whole(sequences)}, 3);
    const std::vector<Gradients> actual = gradients(*backend_, p, sequences, douts, run);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const AttentionReference expected = reference_attention(
          p, run.cache, s, lengths[s], sequences[s].q.values(), douts[s].values(), run.rows[s].out);
      const std::string what = fmt::format(
          "heads {}/{} width {} window {} {} cache {} length {}", p.heads, p.kv_heads, p.width,
          p.window, tensor::dtype_name(p.dtype), tensor::dtype_name(p.cache), lengths[s]);
      const Tolerance bound = tolerance(Op::kAttentionBackward, p.dtype);
      expect_near(actual[s].dq, expected.dq, bound, what + " dq");
      expect_near(actual[s].dk, expected.dk, bound, what + " dk");
      expect_near(actual[s].dv, expected.dv, bound, what + " dv");
    }
  }
};

TEST_P(AttentionBackwardTest, EqualsFloat64) {
  for (const int64_t width : {2, 16, 64, 80, 96, 256}) check({.width = width}, {1, 7, 17, 129});
  for (const int64_t group : {1, 3, 8}) {
    check({.heads = 2 * group, .kv_heads = 2, .width = 16}, {70, 3});
  }
  for (const int64_t window : {1, 8, 65}) check({.window = window}, {32, 150});
  check({.page_size = 64, .dtype = DType::kBF16, .cache = DType::kBF16}, {17, 129});
  check({.dtype = DType::kBF16, .cache = DType::kE4M3}, {33});
}

// d(Σ dout · out) along a direction in q, k and v, by central differences of the forward.
TEST_P(AttentionBackwardTest, EqualsFiniteDifferences) {
  const AttentionProblem p{.heads = 4, .kv_heads = 2, .width = 16, .window = 8};
  std::vector<AttentionSequence> sequences;
  sequences.push_back(make_sequence(p, 20, 1));
  std::vector<Array> douts;
  douts.push_back(random_array(p.dtype, Shape{20, p.heads, p.width}, 8));
  const AttentionRun run = run_attention(*backend_, p, sequences, {whole(sequences)});
  const Gradients actual = gradients(*backend_, p, sequences, douts, run)[0];
  const auto loss = [&] {
    const AttentionRun moved = run_attention(*backend_, p, sequences, {whole(sequences)});
    double sum = 0;
    for (size_t i = 0; i < moved.rows[0].out.size(); ++i) {
      sum += moved.rows[0].out[i] * douts[0].get(static_cast<int64_t>(i));
    }
    return sum;
  };
  for (const auto& [array, gradient] : {std::pair(&sequences[0].q, &actual.dq),
                                        {&sequences[0].k, &actual.dk},
                                        {&sequences[0].v, &actual.dv}}) {
    const std::vector<double> start = array->values();
    const auto count = static_cast<int64_t>(start.size());
    const std::vector<double> direction = normal_values(count, 77);
    constexpr double kStep = 1e-3;
    const auto move = [&](double by) {
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        array->set(i, start[at] + by * direction[at]);
      }
      return loss();
    };
    double expected = 0;
    for (size_t i = 0; i < start.size(); ++i) expected += (*gradient)[i] * direction[i];
    const double slope = (move(kStep) - move(-kStep)) / (2 * kStep);
    move(0);
    expect_near({slope}, {expected}, kFiniteDifference, "slope");
  }
}

// The same bytes alone, among others and on two threads.
TEST_P(AttentionBackwardTest, DependsOnItsSequenceAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const AttentionProblem p{.dtype = dtype, .cache = dtype};
    std::vector<AttentionSequence> alone;
    std::vector<Array> dout;
    alone.push_back(make_sequence(p, 90, 1));
    dout.push_back(random_array(dtype, Shape{90, p.heads, p.width}, 2));
    const Gradients expected =
        gradients(*backend_, p, alone, dout, run_attention(*backend_, p, alone, {whole(alone)}))[0];
    std::vector<AttentionSequence> sequences;
    std::vector<Array> douts;
    for (const int64_t length : {5, 65, 1}) {
      sequences.push_back(make_sequence(p, length, static_cast<uint32_t>(length)));
      douts.push_back(random_array(dtype, Shape{length, p.heads, p.width}, 3));
    }
    sequences.push_back(std::move(alone[0]));
    douts.push_back(std::move(dout[0]));
    for (const int threads : {1, 2}) {
      const std::unique_ptr<ops::Backend> backend = make_backend(threads);
      const AttentionRun run = run_attention(*backend, p, sequences, {whole(sequences)}, 4);
      EXPECT_TRUE(gradients(*backend, p, sequences, douts, run)[3] == expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionBackwardTest, ::testing::ValuesIn(test::cpu_isas()),
                         isa_of);

}  // namespace
}  // namespace octet::parity
