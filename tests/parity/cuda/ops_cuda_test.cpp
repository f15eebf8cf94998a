// Elementwise ops, norms, rotation, sampling and the optimiser against the oracle.
#include <bit>
#include <functional>

#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

class OpsCuda : public CudaTest {};

Tolerance tolerance_of(DType dtype) { return dtype == DType::kBF16 ? kOneBf16 : kF32; }

TEST_F(OpsCuda, ConvertsAddsGathersAndScatters) {
  for (const int64_t rows : {1, 7, 129}) {
    const Array x(DType::kF32, Shape{rows, 77}, hostile_values(rows * 77, 1), 5);
    const Array a(DType::kBF16, Shape{rows, 77}), b(DType::kBF16, Shape{rows, 77});
    cpu().convert(x, a);
    gpu().convert(x, b);
    expect_same(b, a, {0, 0}, "to BF16");
    const Array c(DType::kF32, Shape{rows, 77}), d(DType::kF32, Shape{rows, 77});
    cpu().convert(a, c);
    gpu().convert(a, d);
    expect_same(d, c, {0, 0}, "to F32");
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Array p = random_array(dtype, Shape{rows, 33}, 2, 1, 3);
      const Array q = random_array(dtype, Shape{rows, 33}, 3);
      const Array e(dtype, Shape{rows, 33}), f(dtype, Shape{rows, 33});
      cpu().add({p, q, e});
      gpu().add({p, q, f});
      EXPECT_TRUE(e.bytes() == f.bytes());
      std::vector<int32_t> ids;
      for (int64_t r = 0; r < rows; ++r) ids.push_back(static_cast<int32_t>((5 * r + 2) % rows));
      const Array ids_array(ids);
      cpu().embedding({p, ids_array, e, 0.3f});
      gpu().embedding({p, ids_array, f, 0.3f});
      EXPECT_TRUE(e.bytes() == f.bytes());
      cpu().scatter_rows({p, ids_array, e});
      gpu().scatter_rows({p, ids_array, f});
      EXPECT_TRUE(e.bytes() == f.bytes());
      ids[0] = -1;  // zeros; nowhere
      const Array holes(ids);
      cpu().embedding({p, holes, e});
      gpu().embedding({p, holes, f});
      EXPECT_TRUE(e.bytes() == f.bytes());
      cpu().scatter_rows({q, holes, e});
      gpu().scatter_rows({q, holes, f});
      EXPECT_TRUE(e.bytes() == f.bytes());
      const Array g(DType::kF32, Shape{rows, 33}), h(DType::kF32, Shape{rows, 33});
      cpu().embedding_backward({p, Array(std::vector<int32_t>(rows, 0)), g, 0.5f});
      gpu().embedding_backward({p, Array(std::vector<int32_t>(rows, 0)), h, 0.5f});
      EXPECT_TRUE(g.bytes() == h.bytes());
    }
  }
}

TEST_F(OpsCuda, ActivationsAndTheirGradients) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const ops::Activation activation : {ops::Activation::kSilu, ops::Activation::kGeluTanh}) {
      for (const int64_t rows : {1, 7, 129}) {
        const Array x = random_array(dtype, Shape{rows, 2 * 70}, 4, 3);
        const Array dy = random_array(dtype, Shape{rows, 70}, 5);
        const Array a(dtype, Shape{rows, 70}), b(dtype, Shape{rows, 70});
        cpu().gated_activation({x, a, activation});
        gpu().gated_activation({x, b, activation});
        expect_same(b, a, tolerance_of(dtype), "forward");
        const Array c(dtype, Shape{rows, 140}), d(dtype, Shape{rows, 140});
        cpu().gated_activation_backward({dy, x, c, activation});
        gpu().gated_activation_backward({dy, x, d, activation});
        expect_same(d, c, tolerance_of(dtype), "backward");
      }
    }
  }
}

TEST_F(OpsCuda, NormsAndTheirGradients) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const Shape& shape :
         {Shape{1, 5}, Shape{7, 1000}, Shape{129, 4096}, Shape{17, 3, 128}, Shape{5, 2, 80}}) {
      const int64_t width = shape[shape.rank() - 1];
      const Array x = random_array(dtype, shape, 6, 2, 8);
      const Array dy = random_array(dtype, shape, 7);
      const Array weight = random_array(DType::kBF16, Shape{width}, 8);
      const Array a(dtype, shape), b(dtype, shape);
      cpu().rms_norm({.x = x, .weight = weight, .y = a, .weight_offset = 1});
      gpu().rms_norm({.x = x, .weight = weight, .y = b, .weight_offset = 1});
      expect_same(b, a, tolerance_of(dtype), "forward " + shape.to_string());
      const Array start = random_array(dtype, shape, 9);
      const Array c = copy(start), d = copy(start);
      const Array e(DType::kF32, Shape{width}), f(DType::kF32, Shape{width});
      cpu().rms_norm_backward(
          {.dy = dy, .x = x, .weight = weight, .dx = c, .dweight = e, .accumulate = true});
      gpu().rms_norm_backward(
          {.dy = dy, .x = x, .weight = weight, .dx = d, .dweight = f, .accumulate = true});
      expect_same(d, c, {1e-5, dtype == DType::kBF16 ? 0x1p-7 : 1e-5}, "dx");
      expect_same(f, e, {1e-4, 1e-4}, "dweight");
    }
  }
}

TEST_F(OpsCuda, RotatesAndBack) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Array x = random_array(dtype, Shape{17, 3, 80}, 10, 1, 16);
    const Array table = random_array(DType::kF32, Shape{64, 80}, 11);
    std::vector<int32_t> positions;
    for (int i = 0; i < 17; ++i) positions.push_back(i * 3);
    const Array positions_array(positions);
    for (const bool inverse : {false, true}) {
      const Array a(dtype, Shape{17, 3, 80}), b(dtype, Shape{17, 3, 80});
      cpu().rope({x, positions_array, table, a, inverse});
      gpu().rope({x, positions_array, table, b, inverse});
      EXPECT_TRUE(a.bytes() == b.bytes());
    }
  }
}

TEST_F(OpsCuda, LogProbsAndTheirGradient) {
  for (const int64_t columns : {3, 513, 20000}) {
    const Array logits = random_array(DType::kF32, Shape{5, columns}, 12, 4);
    const int64_t num_known = columns - 1;
    const Array targets(std::vector<int32_t>{0, -1, 1, static_cast<int32_t>(columns - 1), 1});
    const Array dlog_probs = random_array(DType::kF32, Shape{5}, 13);
    const Array dentropy = random_array(DType::kF32, Shape{5}, 14);
    Array results[2][3];
    for (const int which : {0, 1}) {
      ops::Backend& backend = which == 0 ? cpu() : gpu();
      Array(&r)[3] = results[which];
      r[0] = Array(DType::kF32, Shape{5});
      r[1] = Array(DType::kF32, Shape{5});
      r[2] = Array(DType::kBF16, Shape{5, columns});
      backend.log_probs({logits, targets, r[0], r[1], 0.7f, num_known});
      backend.log_probs_backward({logits, targets, dlog_probs, dentropy, r[2], 0.7f, num_known});
    }
    expect_same(results[1][0], results[0][0], {4e-6, 2e-6}, "log-probabilities");
    expect_same(results[1][1], results[0][1], {4e-6, 4e-6}, "entropies");
    expect_same(results[1][2], results[0][2], {1e-7, 0x1p-7}, "gradient");
  }
}

TEST_F(OpsCuda, DrawsTheOraclesIds) {
  std::vector<ops::SampleParams> params;
  RandomSequence random({.seed = 3}, RngUse::kInit);
  for (const float temperature : {0.0f, 0.7f, 1.0f, 1.5f}) {
    for (const float top_p : {1.0f, 0.9f, 0.3f}) {
      for (const float min_p : {0.0f, 0.05f}) {
        for (const int32_t top_k : {0, 1, 5, 100}) {
          params.push_back({temperature, top_p, min_p, top_k, random.next_word()});
        }
      }
    }
  }
  const auto rows = static_cast<int64_t>(params.size());
  for (const int64_t columns : {2, 65, 1000, 50257}) {
    for (const bool ties : {false, true}) {
      Array logits = random_array(DType::kF32, Shape{rows, columns}, 15, 2);
      if (ties) {
        for (int64_t i = 0; i < rows * columns; ++i) logits.set(i, std::round(logits.get(i)));
      }
      Array ids[2], log_probs[2], kept[2];
      for (const int which : {0, 1}) {
        ids[which] = Array(DType::kI32, Shape{rows});
        log_probs[which] = Array(DType::kF32, Shape{rows});
        kept[which] = Array(DType::kF32, Shape{rows});
        (which == 0 ? cpu() : gpu())
            .sample({.logits = logits,
                     .params = params,
                     .ids = ids[which],
                     .log_probs = log_probs[which],
                     .kept_log_probs = kept[which],
                     .num_known = columns});
      }
      int64_t different = 0;
      for (int64_t i = 0; i < rows; ++i) different += ids[0].get(i) != ids[1].get(i) ? 1 : 0;
      EXPECT_EQ(different, 0) << columns << " columns, ties " << ties;
      expect_same(log_probs[1], log_probs[0], {4e-6, 2e-6}, "log-probabilities");
      expect_same(kept[1], kept[0], {4e-6, 2e-6}, "kept log-probabilities");
      // The scorer's bytes for the drawn ids.
      const Array scored(DType::kF32, Shape{1});
      for (int64_t i = 0; i < rows; ++i) {
        const float t = params[static_cast<size_t>(i)].temperature;
        gpu().log_probs({logits.view().slice_rows(i, 1), ids[1].view().slice_rows(i, 1), scored,
                         TensorView(), t == 0 ? 1.0f : t, columns});
        ASSERT_EQ(scored.get(0), log_probs[1].get(i));
      }
    }
  }
}

// Rows whose cuts a histogram of the weights does not narrow down: more equal or nearly equal
// weights than are listed, ties at the cut, tails of many factors of two, ids without any weight.
TEST_F(OpsCuda, FiltersRowsOfManyNearWeights) {
  constexpr int64_t kColumns = 151936, kKnown = 151669;
  const std::vector<double> noise = normal_values(kColumns, 21);
  const std::vector<std::function<double(int64_t)>> shapes = {
      [](int64_t) { return 1.5; },
      [](int64_t v) { return -2e-6 * static_cast<double>(v * 31 % 64); },
      [&](int64_t v) { return noise[v]; },
      [&](int64_t v) { return 8 * noise[v]; },
      [](int64_t v) { return v % 3 == 0 ? 0.0 : -0.5; },
      [](int64_t v) { return -1e-3 * static_cast<double>(v); },
      [](int64_t v) { return v % 5000 == 7 ? 2.0 : -std::numeric_limits<double>::infinity(); },
      [](int64_t v) { return v == 70000 ? 30.0 : -30.0; },
      [](int64_t v) { return v < 60000 ? std::nan("") : 1.0; }};
  std::vector<ops::SampleParams> params;
  RandomSequence random({.seed = 4}, RngUse::kInit);
  for (const ops::SampleParams& rule : {ops::SampleParams{.top_p = 0.95f},
                                        {.top_p = 1e-6f},
                                        {.top_p = 0x1.fffffep-1f},
                                        {.top_k = 1},
                                        {.top_k = 70000},
                                        {.top_p = 0.5f, .min_p = 0.1f, .top_k = 151668},
                                        {.temperature = 0.3f, .top_p = 0.8f, .top_k = 100000}}) {
    for (int i = 0; i < 2; ++i) {
      params.push_back(rule);
      params.back().random = i == 0 ? 0 : random.next_word();
    }
  }
  const auto rows = static_cast<int64_t>(params.size());
  for (size_t shape = 0; shape < shapes.size(); ++shape) {
    const Array logits(DType::kF32, Shape{rows, kColumns});
    for (int64_t v = 0; v < kColumns; ++v) {
      const auto logit = static_cast<float>(shapes[shape](v));
      for (int64_t r = 0; r < rows; ++r) logits.view().row<float>(r)[v] = logit;
    }
    Array ids[2], log_probs[2], kept[2];
    const auto draw = [&](ops::Backend& backend, int64_t first, int64_t count, Array& id,
                          Array& log_prob, Array& kept_log_prob) {
      id = Array(DType::kI32, Shape{count});
      log_prob = Array(DType::kF32, Shape{count});
      kept_log_prob = Array(DType::kF32, Shape{count});
      backend.sample({.logits = logits.view().slice_rows(first, count),
                      .params = std::span(params).subspan(first, count),
                      .ids = id,
                      .log_probs = log_prob,
                      .kept_log_probs = kept_log_prob,
                      .num_known = kKnown});
    };
    draw(cpu(), 0, rows, ids[0], log_probs[0], kept[0]);
    draw(gpu(), 0, rows, ids[1], log_probs[1], kept[1]);
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(ids[1].get(r), ids[0].get(r)) << "shape " << shape << " row " << r;
    }
    expect_same(log_probs[1], log_probs[0], {4e-6, 2e-6}, "log-probabilities");
    expect_same(kept[1], kept[0], {4e-6, 2e-6}, "kept log-probabilities");
    for (const int64_t r : {int64_t{0}, rows - 1}) {
      Array id, log_prob, kept_log_prob;
      draw(gpu(), r, 1, id, log_prob, kept_log_prob);
      EXPECT_EQ(id.get(0), ids[1].get(r));
      const auto bits = [](const Array& array, int64_t row) {
        return std::bit_cast<uint32_t>(*array.view().row<float>(row));
      };
      EXPECT_EQ(bits(log_prob, 0), bits(log_probs[1], r));
      EXPECT_EQ(bits(kept_log_prob, 0), bits(kept[1], r));
    }
  }
}

TEST_F(OpsCuda, GreedyPassesOverNotANumber) {
  const double nan = std::nan("");
  const Array logits(DType::kF32, Shape{2, 4}, {nan, 1, 3, 3, nan, nan, nan, nan});
  const std::vector<ops::SampleParams> params{{.temperature = 0}, {.temperature = 1}};
  const Array ids(DType::kI32, Shape{2}), log_probs(DType::kF32, Shape{2});
  gpu().sample({.logits = logits,
                .params = params,
                .ids = ids,
                .log_probs = log_probs,
                .kept_log_probs = {},
                .num_known = 4});
  EXPECT_EQ(ids.get(0), 2);
  EXPECT_EQ(ids.get(1), 0);
}

TEST_F(OpsCuda, OptimiserStepsAndNorms) {
  constexpr int64_t kCount = 40000;
  const Array gradient = random_array(DType::kF32, Shape{kCount}, 16);
  const Array start = random_array(DType::kF32, Shape{kCount}, 17);
  const Array m = random_array(DType::kF32, Shape{kCount}, 18, 0.1);
  const Array v(DType::kF32, Shape{kCount}, std::vector<double>(kCount, 0.01));
  Array w[2], first[2], second[2];
  for (const int which : {0, 1}) {
    w[which] = copy(start);
    first[which] = copy(m);
    second[which] = copy(v);
    (which == 0 ? cpu() : gpu())
        .adamw({.master = w[which],
                .gradient = gradient,
                .first_moment = first[which],
                .second_moment = second[which],
                .learning_rate = 1e-2f,
                .weight_decay = 0.1f,
                .gradient_scale = 0.5f,
                .step = 3});
  }
  EXPECT_TRUE(w[0].bytes() == w[1].bytes());
  EXPECT_TRUE(first[0].bytes() == first[1].bytes());
  EXPECT_TRUE(second[0].bytes() == second[1].bytes());
  const Array hostile(DType::kF32, Shape{kCount}, hostile_values(kCount, 19));
  const ops::SquaredNorm a = cpu().squared_norm(hostile), b = gpu().squared_norm(hostile);
  EXPECT_EQ(a.non_finite, b.non_finite);
  EXPECT_NEAR(b.sum / a.sum, 1.0, 1e-12);
}

TEST_F(OpsCuda, RefusesWhatItCannotDo) {
  const Array x(DType::kF32, Shape{4, 16}), w(DType::kF32, Shape{4, 16}),
      y(DType::kF32, Shape{4, 4});
  const ops::Weight weight{w.view(), {}};
  EXPECT_THROW(gpu().linear({.x = x, .xq = {}, .weights = {&weight, 1}, .bias = {}, .y = y}),
               Error);
}

}  // namespace
}  // namespace octet::parity
