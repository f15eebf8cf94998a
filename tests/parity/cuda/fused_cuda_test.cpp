// Ops that take the residual add, the quantiser or their neighbours along: the bytes and counters
// of their parts one after the other.
#include "parity/cuda/cuda_test.h"

namespace octet::parity {
namespace {

using tensor::Granularity;
using tensor::ScaleFormat;

class OpsCudaFused : public CudaTest {
 protected:
  struct Codes {
    Array codes, scales;
    ops::QuantizedOutput output;
  };
  static Codes room(Granularity granularity, ScaleFormat format, bool keep_dense, int64_t rows,
                    int64_t columns) {
    Codes room{Array(DType::kE4M3, Shape{rows, columns}),
               Array(DType::kF32, tensor::scale_shape(granularity, rows, columns)),
               {}};
    room.output = {{room.codes, room.scales, granularity}, format, keep_dense};
    return room;
  }

  // The oracle's codes, scales and counters for what the device computed.
  void expect_quantized(const Codes& actual, const Array& dense, const std::string& what) {
    const ops::QuantizeCounters m = gpu().take_quantize_counters();
    cpu().take_quantize_counters();
    const int64_t rows = actual.codes.view().shape[0], columns = actual.codes.view().shape[1];
    const Granularity granularity = actual.output.out.granularity;
    const Codes expected = room(granularity, actual.output.scale_format, true, rows, columns);
    cpu().quantize({.x = dense,
                    .column_scale = {},
                    .out = expected.output.out,
                    .scale_format = actual.output.scale_format});
    ASSERT_TRUE(expected.scales.bytes() == actual.scales.bytes()) << what;
    ASSERT_TRUE(expected.codes.bytes() == actual.codes.bytes()) << what;
    expect_counters(m, cpu().take_quantize_counters(), what);
  }
  static void expect_counters(const ops::QuantizeCounters& actual,
                              const ops::QuantizeCounters& expected, const std::string& what) {
    EXPECT_EQ(actual.elements, expected.elements) << what;
    EXPECT_EQ(actual.saturated, expected.saturated) << what;
    EXPECT_EQ(actual.underflowed, expected.underflowed) << what;
    EXPECT_EQ(actual.not_a_number, expected.not_a_number) << what;
  }
};

// Values of every magnitude that BF16 has, a narrow band of them to a row; some rows of zeros, some
// with what is not finite.
Array rows_of_all_sizes(int64_t rows, int64_t columns) {
  Array x(DType::kBF16, Shape{rows, columns});
  uint32_t seed = 7;
  for (int64_t r = 0; r < rows; ++r) {
    const auto top = static_cast<uint32_t>(r * 254 / std::max<int64_t>(rows - 1, 1));
    for (int64_t c = 0; c < columns; ++c) {
      seed = seed * 1664525u + 1013904223u;
      const uint32_t exponent = top - std::min(top, seed >> 24 & 15);
      uint32_t bits = (seed & 0x8000u) | exponent << 7 | (seed >> 16 & 0x7Fu);
      if (r % 9 == 5) bits &= 0x8000u;
      if (r % 7 == 3 && (seed >> 10 & 63) == 0) bits = seed & 1 ? 0xFF80u : 0x7FC0u;
      x.view().as<uint16_t>()[r * columns + c] = static_cast<uint16_t>(bits);
    }
  }
  return x;
}

TEST_F(OpsCudaFused, QuantisesRowsOfAllSizes) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{255, 1024},
                                                                              {256, 8},
                                                                              {1, 4096},
                                                                              {33, 4096},
                                                                              {34, 12288},
                                                                              {2, 25600},
                                                                              {50, 25600},
                                                                              {3, 32768},
                                                                              {1100, 520},
                                                                              {1100, 4096},
                                                                              {100, 12288}}) {
    const Array x = rows_of_all_sizes(rows, columns);
    for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
      for (const Granularity granularity : {Granularity::kRow, Granularity::kRowBlock}) {
        for (const ScaleFormat format : {ScaleFormat::kF32, ScaleFormat::kPow2}) {
          Array codes[2], scales[2];
          ops::QuantizeCounters counters[2];
          for (const int which : {0, 1}) {
            codes[which] = Array(dtype, Shape{rows, columns});
            scales[which] = Array(DType::kF32, tensor::scale_shape(granularity, rows, columns));
            ops::Backend& backend = which == 0 ? cpu() : gpu();
            backend.take_quantize_counters();
            backend.quantize({.x = x,
                              .column_scale = {},
                              .out = {codes[which], scales[which], granularity},
                              .scale_format = format});
            counters[which] = backend.take_quantize_counters();
          }
          const std::string what =
              fmt::format("[{}, {}] {} {} pow2 {}", rows, columns, tensor::dtype_name(dtype),
                          tensor::granularity_name(granularity), format == ScaleFormat::kPow2);
          ASSERT_TRUE(scales[0].bytes() == scales[1].bytes()) << what;
          ASSERT_TRUE(codes[0].bytes() == codes[1].bytes()) << what;
          expect_counters(counters[1], counters[0], what);
        }
      }
    }
  }
}

TEST_F(OpsCudaFused, NormsAddAndQuantise) {
  for (const int64_t rows : {1, 3, 129}) {
    for (const int64_t width : {8, 63, 64, 200, 256, 1000, 4096, 5120, 8192, 12288}) {
      for (const bool adds : {false, true}) {
        const Array x = random_array(DType::kBF16, Shape{rows, width}, 1, 3, adds ? 8 : 0);
        const Array branch = random_array(DType::kBF16, Shape{rows, width}, 2, 1, 16);
        const Array weight = random_array(DType::kBF16, Shape{width}, 3);
        if (rows > 1) branch.view().row<uint16_t>(1)[width / 2] = 0x7F80;  // an infinity
        // The parts.
        const Array sum(DType::kBF16, Shape{rows, width}), y(DType::kBF16, Shape{rows, width});
        const Array oracle_sum(DType::kBF16, Shape{rows, width});
        const Array oracle_y(DType::kBF16, Shape{rows, width});
        gpu().add({x, branch, sum});
        cpu().add({x, branch, oracle_sum});
        EXPECT_TRUE(sum.bytes() == oracle_sum.bytes());
        const Array& stream = adds ? sum : x;
        gpu().rms_norm({.x = stream, .weight = weight, .y = y, .weight_offset = 1});
        cpu().rms_norm({.x = stream, .weight = weight, .y = oracle_y, .weight_offset = 1});
        expect_same(y, oracle_y, kOneBf16, "norm");
        for (const Granularity granularity :
             {Granularity::kRow, Granularity::kRowBlock, Granularity::kTensor}) {
          for (const ScaleFormat format : {ScaleFormat::kF32, ScaleFormat::kPow2}) {
            for (const bool keep_dense : {false, true}) {
              const std::string what =
                  fmt::format("[{}, {}] adds {} {} keeps {}", rows, width, adds,
                              tensor::granularity_name(granularity), keep_dense);
              const Array fused_y(DType::kBF16, Shape{rows, width});
              const Array fused_sum = copy(x);  // in place
              const Codes codes = room(granularity, format, keep_dense, rows, width);
              gpu().take_quantize_counters();
              gpu().rms_norm({.x = fused_sum,
                              .weight = weight,
                              .y = fused_y,
                              .weight_offset = 1,
                              .branch = adds ? branch.view() : TensorView(),
                              .sum = adds ? fused_sum.view() : TensorView(),
                              .quantized = codes.output});
              expect_quantized(codes, y, what);
              EXPECT_EQ(fused_sum.values(), stream.values()) << what;
              if (keep_dense) {
                EXPECT_TRUE(fused_y.bytes() == y.bytes()) << what;
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(OpsCudaFused, ActivationsQuantise) {
  for (const int64_t rows : {1, 3, 40, 129}) {
    for (const int64_t width : {8, 63, 200, 1000, 4864, 12288, 25600}) {
      if (rows > 3 && width > 12288) continue;
      const ops::Activation activation =
          width == 200 ? ops::Activation::kGeluTanh : ops::Activation::kSilu;
      const Array x = random_array(DType::kBF16, Shape{rows, 2 * width}, 4, 3, 8);
      if (rows > 1) x.view().row<uint16_t>(1)[width / 2] = 0x7F80;
      const Array y(DType::kBF16, Shape{rows, width}), oracle(DType::kBF16, Shape{rows, width});
      gpu().gated_activation({x, y, activation});
      cpu().gated_activation({x, oracle, activation});
      expect_same(y, oracle, kOneBf16, "activation");
      for (const Granularity granularity :
           {Granularity::kRow, Granularity::kRowBlock, Granularity::kTensor}) {
        for (const ScaleFormat format : {ScaleFormat::kF32, ScaleFormat::kPow2}) {
          for (const bool keep_dense : {false, true}) {
            const std::string what = fmt::format("[{}, {}] {} keeps {}", rows, width,
                                                 tensor::granularity_name(granularity), keep_dense);
            const Array fused(DType::kBF16, Shape{rows, width});
            const Codes codes = room(granularity, format, keep_dense, rows, width);
            gpu().take_quantize_counters();
            gpu().gated_activation({x, fused, activation, codes.output});
            expect_quantized(codes, y, what);
            if (keep_dense) {
              EXPECT_TRUE(fused.bytes() == y.bytes()) << what;
            }
          }
        }
      }
    }
  }
}

// Kernels share many rows out otherwise than few.
TEST_F(OpsCudaFused, ManyRowsAreTheSameRows) {
  constexpr int64_t kRows = 1100, kFew = 3;
  for (const int64_t width : {264, 4096, 12288}) {
    const Array x = random_array(DType::kBF16, Shape{kRows, 2 * width}, 11);
    const Array weight = random_array(DType::kBF16, Shape{width}, 12);
    const TensorView rows = x.view().slice_columns(0, width);
    const Array y(DType::kBF16, Shape{kRows, width}), few_y(DType::kBF16, Shape{kFew, width});
    const Array out(DType::kBF16, Shape{kRows, width}), few_out(DType::kBF16, Shape{kFew, width});
    const Codes codes = room(Granularity::kRow, ScaleFormat::kF32, true, kRows, width);
    const Codes few = room(Granularity::kRow, ScaleFormat::kF32, true, kFew, width);
    gpu().rms_norm({.x = rows, .weight = weight, .y = y});
    gpu().rms_norm({.x = rows.slice_rows(500, kFew), .weight = weight, .y = few_y});
    gpu().gated_activation({.gate_up = x, .out = out, .quantized = codes.output});
    gpu().gated_activation(
        {.gate_up = x.view().slice_rows(500, kFew), .out = few_out, .quantized = few.output});
    for (int64_t r = 0; r < kFew; ++r) {
      const auto bytes = static_cast<size_t>(width);
      EXPECT_EQ(
          std::memcmp(y.view().row<char>(2 * (500 + r)), few_y.view().row<char>(2 * r), 2 * bytes),
          0);
      EXPECT_EQ(std::memcmp(out.view().row<char>(2 * (500 + r)), few_out.view().row<char>(2 * r),
                            2 * bytes),
                0);
      EXPECT_EQ(
          std::memcmp(codes.codes.view().row<char>(500 + r), few.codes.view().row<char>(r), bytes),
          0);
    }
  }
}

struct Cache {
  Array k, v, k_scale, v_scale;
  Cache(DType dtype, int64_t pages, int64_t page_size, int64_t heads, int64_t width)
      : k(dtype, Shape{pages, heads, page_size, width}),
        v(dtype, Shape{pages, heads, page_size, width}),
        k_scale(DType::kF32, Shape{pages, heads, page_size}),
        v_scale(DType::kF32, Shape{pages, heads, page_size}) {}
  ops::KvCacheView view() const { return {k, v, k_scale, v_scale}; }
  bool operator==(const Cache& other) const {
    return k.bytes() == other.k.bytes() && v.bytes() == other.v.bytes() &&
           k_scale.bytes() == other.k_scale.bytes() && v_scale.bytes() == other.v_scale.bytes();
  }
};

// Sequences that go on where some began, longer and shorter than pages; or single tokens.
std::vector<int32_t> slots_of(int64_t num_tokens, int64_t num_slots, bool in_runs) {
  constexpr int32_t kLengths[] = {21, 16, 5, 40, 333, 17, 48, 2};
  std::vector<int32_t> slots;
  int32_t slot = 0;
  for (int run = 0; static_cast<int64_t>(slots.size()) < num_tokens; ++run) {
    if (in_runs) {
      slot = (slot + 15) / 16 * 16 + (run % 3 == 2 ? 7 : 0);
      for (int32_t i = 0; i < kLengths[run % 8]; ++i) slots.push_back(slot++);
    } else {
      slots.push_back(run % 6 == 2 ? -1 : static_cast<int32_t>(run * 11 % num_slots));
    }
  }
  slots.resize(static_cast<size_t>(num_tokens));
  if (in_runs) slots[static_cast<size_t>(num_tokens / 2)] = -1;
  return slots;
}

// The default composition, of ops on the device, and each token by itself.
TEST_F(OpsCudaFused, AttentionInputsEqualTheirParts) {
  constexpr int64_t kPageSize = 16;
  for (const auto& [width, num_tokens, in_runs] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{20, 21, false},
                                                       {64, 21, false},
                                                       {80, 21, false},
                                                       {96, 21, false},
                                                       {128, 21, false},
                                                       {192, 21, false},
                                                       {256, 21, false},
                                                       {128, 1100, false},
                                                       {64, 1100, true},
                                                       {80, 1100, true},
                                                       {128, 1100, true},
                                                       {256, 1100, true}}) {
    const int64_t num_pages = num_tokens / kPageSize * (in_runs ? 2 : 1) + 2;
    const int64_t num_slots = num_pages * kPageSize;
    for (const auto& [q_heads, kv_heads] :
         std::vector<std::pair<int64_t, int64_t>>{{4, 2}, {9, 3}}) {
      for (const DType cache_dtype : {DType::kE4M3, DType::kBF16}) {
        for (const bool norms : {true, false}) {
          const Array qkv = random_array(
              DType::kBF16, Shape{num_tokens, (q_heads + 2 * kv_heads) * width}, 5, 2, 8);
          qkv.view().row<uint16_t>(3)[(q_heads + kv_heads) * width + 1] = 0xFF80;  // in v
          qkv.view().row<uint16_t>(4)[q_heads * width + 2] = 0x7FC0;               // in k
          qkv.view().row<uint16_t>(5)[(q_heads + kv_heads) * width + 9] = 0xFFC0;  // in v
          const Array q_norm = random_array(DType::kBF16, Shape{width}, 6);
          const Array k_norm = random_array(DType::kBF16, Shape{width}, 7);
          const Array table = random_array(DType::kF32, Shape{64, width}, 8);
          std::vector<int32_t> positions;
          for (int32_t t = 0; t < num_tokens; ++t) positions.push_back(t * 5 % 64);
          const std::vector<int32_t> slots = slots_of(num_tokens, num_slots, in_runs);
          const Array positions_array(positions), slots_array(slots);
          const auto args_of = [&](const Array& q, const Array& k, const Cache& cache) {
            return ops::AttentionInputsArgs{.qkv = qkv,
                                            .q_norm = norms ? q_norm.view() : TensorView(),
                                            .k_norm = norms ? k_norm.view() : TensorView(),
                                            .positions = positions_array,
                                            .rope_table = table,
                                            .slots = slots_array,
                                            .q_out = q,
                                            .k_out = k,
                                            .cache = cache.view(),
                                            .eps = 1e-5f};
          };
          const std::string what = fmt::format("{} heads of {}, cache {}, norms {}", q_heads, width,
                                               tensor::dtype_name(cache_dtype), norms);
          const auto make_q = [&] {
            return Array(DType::kBF16, Shape{num_tokens, q_heads, width}, 16);
          };
          const auto make_k = [&] {
            return Array(DType::kBF16, Shape{num_tokens, kv_heads, width});
          };
          const Array q = make_q(), k = make_k(), fused_q = make_q(), fused_k = make_k();
          const Array single_q = make_q(), single_k = make_k();
          const Cache cache(cache_dtype, num_pages, kPageSize, kv_heads, width);
          const Cache fused_cache(cache_dtype, num_pages, kPageSize, kv_heads, width);
          const Cache single_cache(cache_dtype, num_pages, kPageSize, kv_heads, width);
          gpu().take_quantize_counters();
          gpu().Backend::attention_inputs(args_of(q, k, cache));
          const ops::QuantizeCounters expected = gpu().take_quantize_counters();
          gpu().attention_inputs(args_of(fused_q, fused_k, fused_cache));
          expect_counters(gpu().take_quantize_counters(), expected, what);
          EXPECT_TRUE(q.bytes() == fused_q.bytes()) << what;
          EXPECT_TRUE(k.bytes() == fused_k.bytes()) << what;
          EXPECT_TRUE(cache == fused_cache) << what;
          const int64_t chunk = num_tokens > 100 ? 275 : 1;
          for (int64_t t = 0; t < num_tokens; t += chunk) {
            ops::AttentionInputsArgs args = args_of(single_q, single_k, single_cache);
            for (TensorView* view :
                 {&args.qkv, &args.positions, &args.slots, &args.q_out, &args.k_out}) {
              *view = view->slice_rows(t, chunk);
            }
            gpu().attention_inputs(args);
          }
          EXPECT_TRUE(q.bytes() == single_q.bytes()) << what;
          EXPECT_TRUE(k.bytes() == single_k.bytes()) << what;
          EXPECT_TRUE(cache == single_cache) << what;
        }
      }
    }
  }
}

// A row's statistics: alone or in a batch, at any address, with or without the entropy, beside
// columns that are not known.
TEST_F(OpsCudaFused, LogProbsDependOnTheRowAlone) {
  constexpr int64_t kRows = 7, kColumns = 151936, kKnown = 151669;
  const Array logits = random_array(DType::kF32, Shape{kRows, kColumns}, 9, 4);
  const Array shifted = random_array(DType::kF32, Shape{kRows, kColumns}, 9, 4, 3);
  for (const float temperature : {1.0f, 0.6f}) {
    const std::vector<ops::SampleParams> params(
        kRows, {.temperature = temperature, .random = 0x9E3779B9u});
    const Array ids(DType::kI32, Shape{kRows}), drawn(DType::kF32, Shape{kRows});
    gpu().sample({.logits = logits,
                  .params = params,
                  .ids = ids,
                  .log_probs = drawn,
                  .kept_log_probs = {},
                  .num_known = kKnown});
    for (const Array* from : {&logits, &shifted}) {
      const Array with(DType::kF32, Shape{kRows}), without(DType::kF32, Shape{kRows});
      const Array entropy(DType::kF32, Shape{kRows}), alone(DType::kF32, Shape{1});
      gpu().log_probs({*from, ids, with, entropy, temperature, kKnown});
      gpu().log_probs({*from, ids, without, TensorView(), temperature, kKnown});
      EXPECT_TRUE(with.bytes() == drawn.bytes());
      EXPECT_TRUE(without.bytes() == drawn.bytes());
      for (int64_t r = 0; r < kRows; ++r) {
        gpu().log_probs({from->view().slice_rows(r, 1), ids.view().slice_rows(r, 1), alone,
                         TensorView(), temperature, kKnown});
        EXPECT_EQ(alone.get(0), drawn.get(r));
      }
    }
  }
}

// The id is the first whose cumulated probability exceeds the random number.
TEST_F(OpsCudaFused, DrawsWhereTheCumulatedSumCrosses) {
  constexpr int64_t kColumns = 20000, kRows = 64;
  const std::vector<double> row = normal_values(kColumns, 10, 3);
  const Array logits(DType::kF32, Shape{kRows, kColumns});
  std::vector<ops::SampleParams> params;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kColumns; ++v) {
      logits.view().row<float>(r)[v] = static_cast<float>(row[static_cast<size_t>(v)]);
    }
    params.push_back({.random = static_cast<uint32_t>(r << 26)});
  }
  const Array ids(DType::kI32, Shape{kRows}), log_probs(DType::kF32, Shape{kRows});
  gpu().sample({.logits = logits,
                .params = params,
                .ids = ids,
                .log_probs = log_probs,
                .kept_log_probs = {},
                .num_known = kColumns});
  std::vector<double> cumulated;
  double sum = 0;
  for (const double z : row) cumulated.push_back(sum += std::exp(static_cast<float>(z)));
  for (int64_t r = 0; r < kRows; ++r) {
    const double target = static_cast<double>(r) / kRows * sum;
    const auto id = static_cast<size_t>(ids.get(r));
    EXPECT_GT(cumulated[id], target - 1e-6 * sum) << r;
    if (id > 0) {
      EXPECT_LE(cumulated[id - 1], target + 1e-6 * sum) << r;
    }
  }
}

}  // namespace
}  // namespace octet::parity
