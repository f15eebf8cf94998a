// Writing and copying cache pages, and what attention refuses.
#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"
#include "parity/ops/attention_problem.h"

namespace octet::parity {
namespace {

class KvCacheTest : public OpTest {};

// The contract of a cache's codes for one row, by the scalar codec.
float scalar_quantize(const float* x, int64_t n, uint8_t* codes) {
  float amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = std::fabs(tensor::round_bf16(x[i]));
    if (std::isfinite(value)) amax = std::max(amax, value);
  }
  const float scale = amax == 0 ? 1.0f : std::max(amax / 448.0f, 0x1p-100f);
  bool has_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    has_nan |= std::isnan(x[i]);
    codes[i] = std::isnan(x[i]) ? 0 : tensor::encode_e4m3(tensor::round_bf16(x[i]) / scale);
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : scale;
}

TEST_P(KvCacheTest, AppendQuantizesEachHeadByTheOneQuantizer) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> hostile = {0.0f,   -0.0f,    kNaN,  kInfinity, -kInfinity, 1e-30f,
                                      1e-45f, -3.3e38f, 448.f, 449.f,     -kNaN,      0.03125f};
  for (const int64_t width : {2, 16, 22, 64, 250}) {
    constexpr int64_t kTokens = 40, kHeads = 3;
    const Array k = random_array(DType::kF32, Shape{kTokens, kHeads, width}, 5);
    const Array v = random_array(DType::kF32, Shape{kTokens, kHeads, width}, 6, 30);
    auto* values = k.view().as<float>();
    v.view().as<float>()[(9 * kHeads + 1) * width + 1] = kNaN;
    RandomSequence random({.seed = 9}, RngUse::kInit);
    for (int64_t i = 0; i < kTokens * kHeads * width; ++i) {
      // Rows of wide and of narrow range, of zeros only, and with hostile values.
      const int64_t kind = i / width % 5;
      if (kind == 1) values[i] *= std::ldexp(1.0f, -static_cast<int>(random.next_below(20)));
      if (kind == 2) values[i] = random.next_below(2) == 0 ? 0.0f : -0.0f;
      if (kind == 3) values[i] *= 1e-37f;
      if (kind == 4 && random.next_below(2) == 0) {
        values[i] = hostile[random.next_below(static_cast<uint32_t>(hostile.size()))];
      }
    }
    const Shape pages{5, kHeads, 16, width};
    const Array ck(DType::kE4M3, pages), cv(DType::kE4M3, pages);
    const Array sk(DType::kF32, Shape{5, kHeads, 16}), sv(DType::kF32, Shape{5, kHeads, 16});
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < kTokens; ++t) slots.push_back(t == 3 ? -1 : 79 - 2 * t);
    backend_->kv_append({.k = k, .v = v, .slots = Array(slots), .cache = {ck, cv, sk, sv}});
    EXPECT_EQ(backend_->take_quantize_counters().elements, 2 * (kTokens - 1) * kHeads * width);
    for (int64_t t = 0; t < kTokens; ++t) {
      if (slots[static_cast<size_t>(t)] < 0) continue;
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t from = t * kHeads + h;
        const int64_t slot = slots[static_cast<size_t>(t)];
        const int64_t to = (slot / 16 * kHeads + h) * 16 + slot % 16;
        for (const auto& [x, codes, scales] :
             {std::tuple(&k, &ck, &sk), std::tuple(&v, &cv, &sv)}) {
          std::vector<uint8_t> expected(static_cast<size_t>(width));
          const float scale =
              scalar_quantize(x->view().as<float>() + from * width, width, expected.data());
          EXPECT_EQ(std::bit_cast<uint32_t>(scales->view().as<float>()[to]),
                    std::bit_cast<uint32_t>(scale));
          std::vector<uint8_t> actual;
          for (int64_t i = 0; i < width; ++i) {
            const int64_t in_head =
                x == &k ? slot % 16 * width + i : ops::value_index(slot % 16, i, width);
            actual.push_back(codes->view().as<uint8_t>()[(to - slot % 16) * width + in_head]);
          }
          EXPECT_EQ(actual, expected) << "token " << t << " head " << h << " width " << width;
        }
      }
    }
  }
}

TEST_P(KvCacheTest, AppendRoundsOnceAndLeavesOtherSlots) {
  const Array k = random_array(DType::kF32, Shape{2, 2, 6}, 1, 1, 5);
  const Array v = random_array(DType::kF32, Shape{2, 2, 6}, 2);
  const Array ck(DType::kBF16, Shape{2, 2, 4, 6}), cv(DType::kBF16, Shape{2, 2, 4, 6});
  backend_->kv_append({.k = k, .v = v, .slots = Array({6, -1}), .cache = {ck, cv, {}, {}}});
  for (int64_t i = 0; i < 2 * 4 * 12; ++i) {
    const int64_t page = i / 48, head = i / 24 % 2, offset = i / 6 % 4, from = head * 6 + i % 6;
    const bool written = page == 1 && offset == 2;
    EXPECT_EQ(ck.get(i), written ? tensor::round_bf16(static_cast<float>(k.get(from))) : 0);
    EXPECT_EQ(cv.get(i), written ? tensor::round_bf16(static_cast<float>(v.get(from))) : 0);
  }
}

// Of E4M3 values whole blocks of 16, of everything else not one token more.
TEST_P(KvCacheTest, CopyTakesTheFirstTokens) {
  for (const DType dtype : {DType::kE4M3, DType::kBF16}) {
    for (const int32_t num_tokens : {0, 1, 3, 16, 17, 48}) {
      const Shape pages{3, 2, 48, 6};
      const Array k(dtype, pages), v(dtype, pages);
      for (int64_t i = 0; i < k.view().num_bytes(); ++i) {
        k.view().as<uint8_t>()[i] = static_cast<uint8_t>(i % 100);
        v.view().as<uint8_t>()[i] = static_cast<uint8_t>(i % 90);
      }
      const Array ks = random_array(DType::kF32, Shape{3, 2, 48}, 1);
      const Array vs = random_array(DType::kF32, Shape{3, 2, 48}, 2);
      const std::vector<double> before[] = {k.values(), v.values(), ks.values(), vs.values()};
      const ops::KvPageCopy copy{2, 0, num_tokens};
      backend_->kv_copy({{k, v, ks, vs}, {&copy, 1}});
      const std::vector<double> after[] = {k.values(), v.values(), ks.values(), vs.values()};
      const bool scales = dtype == DType::kE4M3;
      for (int array = 0; array < 4; ++array) {
        const size_t width = array < 2 ? 6 : 1;
        size_t count = static_cast<size_t>(num_tokens);
        if (array == 1 && scales) count = (count + 15) / 16 * 16;
        if (array >= 2 && !scales) count = 0;
        for (size_t i = 0; i < before[array].size(); ++i) {
          const bool copied = i < 96 * width && i / width % 48 < count;
          ASSERT_EQ(after[array][i], before[array][copied ? i + 192 * width : i])
              << num_tokens << " tokens, array " << array << " at " << i;
        }
      }
    }
  }
}

// Every element of a page has a place of its own, a block's within the block.
TEST(KvLayout, ValuesLieInBlocks) {
  constexpr int64_t kTokens = 48, kWidth = 6;
  std::vector<int> uses(kTokens * kWidth);
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t d = 0; d < kWidth; ++d) {
      const int64_t at = ops::value_index(token, d, kWidth);
      EXPECT_EQ(at / (16 * kWidth), token / 16);
      EXPECT_EQ(at / 16 % kWidth, d);
      ++uses[static_cast<size_t>(at)];
    }
  }
  EXPECT_EQ(std::count(uses.begin(), uses.end(), 1), kTokens * kWidth);
  // The word of a lane of the matrix unit: tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  EXPECT_EQ(ops::value_place(2), 4);
  EXPECT_EQ(ops::value_place(3), 5);
  EXPECT_EQ(ops::value_place(10), 6);
  EXPECT_EQ(ops::value_place(11), 7);
}

TEST_P(KvCacheTest, PagesOfCodesHaveWholeBlocks) {
  const Array kv(DType::kF32, Shape{1, 2, 8}), scales(DType::kF32, Shape{2, 2, 24});
  const Array codes(DType::kE4M3, Shape{2, 2, 24, 8}), dense(DType::kBF16, Shape{2, 2, 24, 8});
  EXPECT_NO_THROW(backend_->kv_append(
      {.k = kv, .v = kv, .slots = Array({0}), .cache = {dense, dense, {}, {}}}));
  try {
    backend_->kv_append(
        {.k = kv, .v = kv, .slots = Array({0}), .cache = {codes, codes, scales, scales}});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("multiple of 16 tokens, but have 24"),
              std::string::npos)
        << error.what();
  }
}

TEST_P(KvCacheTest, BadInputIsRefused) {
  const Array cache(DType::kF32, Shape{2, 2, 16, 8});
  const ops::KvCacheView view{cache, cache, {}, {}};
  const Array q(DType::kF32, Shape{3, 4, 8}), out(DType::kF32, Shape{3, 4, 8});
  const Array kv(DType::kF32, Shape{3, 2, 8});
  Array table(DType::kI32, Shape{1, 2});
  const auto attend = [&](std::vector<int32_t> offsets, std::vector<int32_t> lengths,
                          const TensorView& query) {
    const Array offsets_array(offsets), lengths_array(lengths);
    backend_->attention({.q = query,
                         .cache = view,
                         .batch = {offsets_array, lengths_array, table},
                         .out = out,
                         .lse = {}});
  };
  EXPECT_NO_THROW(attend({0, 3}, {3}, q));
  EXPECT_THROW(attend({0, 4}, {4}, q), Error);   // more tokens than rows
  EXPECT_THROW(attend({0, 3}, {2}, q), Error);   // new tokens past the context
  EXPECT_THROW(attend({0, 3}, {33}, q), Error);  // past the table
  EXPECT_THROW(attend({0, 3}, {3, 1}, q), Error);
  EXPECT_THROW(attend({0, 3}, {3}, kv), Error);  // out has other heads
  table.set(0, 2);
  EXPECT_THROW(attend({0, 3}, {3}, q), Error);  // no such page
  EXPECT_THROW(backend_->kv_append({.k = kv, .v = kv, .slots = Array({0, 1, 32}), .cache = view}),
               Error);
  EXPECT_THROW(backend_->kv_append({.k = q, .v = q, .slots = Array({0, 1, 2}), .cache = view}),
               Error);
  for (const ops::KvPageCopy wrong : {ops::KvPageCopy{2, 0, 1}, {1, 0, 17}, {0, -1, 1}}) {
    EXPECT_THROW(backend_->kv_copy({view, {&wrong, 1}}), Error);
  }
}

// Pages that sequences are said to share are compared by whoever does not read them once.
TEST_P(KvCacheTest, WhatIsSharedMustBeTheSame) {
  const Array cache(DType::kF32, Shape{3, 2, 16, 8});
  const Array q(DType::kF32, Shape{2, 4, 8}), out(DType::kF32, Shape{2, 4, 8});
  const auto attend = [&](std::vector<int32_t> tables, std::vector<int32_t> firsts,
                          std::vector<int32_t> shared) {
    const Array offsets({0, 1, 2}), lengths({17, 20}), firsts_array(firsts), shared_array(shared);
    Array table(DType::kI32, Shape{2, 2});
    for (size_t i = 0; i < 4; ++i) table.set(static_cast<int64_t>(i), tables[i]);
    ops::AttentionArgs args{.q = q,
                            .cache = {cache, cache, {}, {}},
                            .batch = {offsets, lengths, table},
                            .out = out,
                            .lse = {}};
    args.batch.shared_first = firsts_array;
    args.batch.shared_pages = shared_array;
    args.batch.max_shared_pages = 2;
    backend_->attention(args);
  };
  EXPECT_NO_THROW(attend({0, 1, 0, 2}, {0, 0}, {1, 1}));
  EXPECT_NO_THROW(attend({0, 1, 1, 2}, {0, 1}, {0, 0}));
  EXPECT_THROW(attend({0, 1, 1, 2}, {0, 0}, {1, 1}), Error);  // other pages
  EXPECT_THROW(attend({0, 1, 0, 1}, {0, 0}, {2, 2}), Error);  // a page that is not full
  EXPECT_THROW(attend({0, 1, 0, 2}, {0, 0}, {1, 0}), Error);  // not what the first one says
  EXPECT_THROW(attend({0, 1, 0, 2}, {0, 2}, {1, 1}), Error);  // a run that begins behind
}

INSTANTIATE_TEST_SUITE_P(Isas, KvCacheTest, ::testing::ValuesIn(test::cpu_isas()), isa_of);

}  // namespace
}  // namespace octet::parity
