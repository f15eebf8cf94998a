#include "io/gguf.h"

#include <cmath>

#include "tensor/codec.h"
#include "unit/io/gguf_builder.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Shape;

class GgufTest : public testing::Test {
 protected:
  GgufFile open(const std::string& content) { return GgufFile(folder_.write("a.gguf", content)); }
  std::string error(const std::string& content) {
    return error_of([&] { open(content); });
  }
  // Values of a one-tensor file.
  std::vector<float> dequantize(uint32_t type, uint64_t elements, const std::string& data) {
    GgufBuilder builder;
    builder.add_tensor("w", {elements}, type, data);
    const GgufFile file = open(builder.build());
    std::vector<float> values(elements);
    gguf_dequantize(*file.find("w"), values);
    return values;
  }

  TempFolder folder_;
};

std::string f16(float value) { return raw(tensor::encode_f16(value)); }

// Byte j holds j in its low half and 15 − j in its high one.
std::string nibbles() {
  std::string bytes;
  for (int j = 0; j < 16; ++j) bytes += static_cast<char>(j | (15 - j) << 4);
  return bytes;
}

TEST_F(GgufTest, ReadsKeysOfEveryType) {
  GgufBuilder builder;
  builder.add("u8", 0, raw<uint8_t>(200));
  builder.add("i8", 1, raw<int8_t>(-5));
  builder.add("u16", 2, raw<uint16_t>(60000));
  builder.add("i16", 3, raw<int16_t>(-6));
  builder.add_u32("u32", 4000000000u);
  builder.add("i32", 5, raw<int32_t>(-7));
  builder.add_f32("f32", 1e-5f);
  builder.add_bool("bool", true);
  builder.add_string("string", "héllo");
  builder.add_i32s("ints", {1, -2});
  builder.add_strings("strings", {"a", "", "bc"});
  builder.add("u64", 10, raw<uint64_t>(1) + "");
  builder.add("i64", 11, raw<int64_t>(-8));
  builder.add("f64", 12, raw(0.1));
  builder.add("huge", 10, raw(~uint64_t{0}));
  const GgufFile file = open(builder.build());
  EXPECT_EQ(file.get_int("u8"), 200);
  EXPECT_EQ(file.get_int("i8"), -5);
  EXPECT_EQ(file.get_int("u16"), 60000);
  EXPECT_EQ(file.get_int("i16"), -6);
  EXPECT_EQ(file.get_int("u32"), 4000000000);
  EXPECT_EQ(file.get_int("i32"), -7);
  EXPECT_EQ(file.get_int("u64"), 1);
  EXPECT_EQ(file.get_int("i64"), -8);
  EXPECT_EQ(file.get_float("f32"), 1e-5);
  EXPECT_EQ(file.get_float("f64"), 0.1);
  EXPECT_TRUE(file.get_bool("bool", false));
  EXPECT_EQ(file.get_string("string"), "héllo");
  EXPECT_EQ(file.get_ints("ints"), (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(file.get_strings("strings"), (std::vector<std::string>{"a", "", "bc"}));
  EXPECT_EQ(file.get_int("none", 3), 3);
  expect_contains(error_of([&] { file.get_int("none"); }), "\"none\" is required");
  for (const char* key : {"string", "huge", "bool", "ints", "f32"}) {
    expect_contains(error_of([&] { file.get_int(key, 3); }), "must be an integer");
  }
  expect_contains(error_of([&] { file.get_ints("strings"); }), "array of integers");
  expect_contains(error_of([&] { file.get_strings("ints"); }), "array of strings");
  expect_contains(error_of([&] { file.get_float("u8"); }), "floating-point");
}

TEST_F(GgufTest, DequantizesByHand) {
  EXPECT_EQ(dequantize(0, 2, raw(1.5f) + raw(-2.0f)), (std::vector<float>{1.5f, -2.0f}));
  EXPECT_EQ(dequantize(1, 2, f16(0.5f) + f16(65504)), (std::vector<float>{0.5f, 65504.0f}));
  EXPECT_EQ(dequantize(30, 1, raw<uint16_t>(0x4040)), std::vector<float>{3.0f});
  const auto q4_0 = dequantize(2, 32, f16(0.5f) + nibbles());
  const auto q4_1 = dequantize(3, 32, f16(0.25f) + f16(-1.0f) + nibbles());
  const std::string high_bits = raw<uint32_t>(0x80010001u);  // of elements 0, 16 and 31
  const auto q5_0 = dequantize(6, 32, f16(0.5f) + high_bits + nibbles());
  const auto q5_1 = dequantize(7, 32, f16(2.0f) + f16(3.0f) + high_bits + nibbles());
  for (int j = 0; j < 32; ++j) {
    const int code = j < 16 ? j : 31 - j;
    const int wide = code + (j == 0 || j == 16 || j == 31 ? 16 : 0);
    EXPECT_EQ(q4_0[j], 0.5f * static_cast<float>(code - 8)) << j;
    EXPECT_EQ(q4_1[j], 0.25f * static_cast<float>(code) - 1) << j;
    EXPECT_EQ(q5_0[j], 0.5f * static_cast<float>(wide - 16)) << j;
    EXPECT_EQ(q5_1[j], 2.0f * static_cast<float>(wide) + 3) << j;
  }
  std::string bytes;
  for (int j = 0; j < 32; ++j) bytes += static_cast<char>(j * 8 - 128);
  const auto q8_0 = dequantize(8, 64, f16(2.0f) + bytes + f16(-1.0f) + bytes);
  for (int j = 0; j < 32; ++j) {
    EXPECT_EQ(q8_0[j], 2.0f * static_cast<float>(j * 8 - 128)) << j;
    EXPECT_EQ(q8_0[32 + j], -1.0f * static_cast<float>(j * 8 - 128)) << j;
  }
  // 15 · d + m is not exact here: product and sum round one after the other.
  const float scale = tensor::decode_f16(0x2E66);  // 0.09998…
  const float minimum = tensor::decode_f16(0xA8F6);
  const auto rounded = dequantize(3, 32, raw<uint16_t>(0x2E66) + raw<uint16_t>(0xA8F6) + nibbles());
  const volatile float product = 15.0f * scale;
  EXPECT_EQ(rounded[15], product + minimum);
}

TEST_F(GgufTest, NamesTypesThatAreNotRead) {
  GgufBuilder builder;
  builder.add_tensor("blk.0.w", {256}, 12, std::string(144, '\0'));
  builder.add_tensor("odd", {256}, 77, "");
  const GgufFile file = open(builder.build());
  expect_contains(error_of([&] { gguf_lossless_dtype(*file.find("blk.0.w")); }),
                  "\"blk.0.w\" has the type Q4_K");
  expect_contains(error_of([&] { gguf_lossless_dtype(*file.find("odd")); }), "type 77");
  EXPECT_EQ(file.find("none"), nullptr);
}

TEST_F(GgufTest, ReversesExtents) {
  GgufBuilder builder;
  builder.add_f32_tensor("w", {3, 2}, std::vector<float>(6, 1));
  const GgufFile file = open(builder.build());
  EXPECT_EQ(file.find("w")->shape, (Shape{2, 3}));
  EXPECT_EQ(gguf_lossless_dtype(*file.find("w")), DType::kF32);
  EXPECT_FALSE(gguf_is_quantized(*file.find("w")));
}

TEST_F(GgufTest, RefusesHostileFiles) {
  GgufBuilder good;
  good.add_string("name", "x");
  good.add_strings("list", {"a", "b"});
  good.add_f32_tensor("w", {4}, {1, 2, 3, 4});
  good.add_f32_tensor("v", {2}, {1, 2});
  const std::string file = good.build();
  EXPECT_NO_THROW(open(file));
  for (size_t size = 1; size < file.size() - 24; ++size) {  // 24: padding after the last tensor
    EXPECT_THROW(open(file.substr(0, size)), Error) << size;
  }

  expect_contains(error("GGML" + file.substr(4)), "starts with \"GGUF\"");
  for (const uint32_t version : {0u, 1u, 4u, 0x03000000u}) {
    GgufBuilder builder;
    builder.version = version;
    expect_contains(error(builder.build()), "version 2 or 3");
  }
  const auto with_value = [&](uint32_t type, const std::string& value) {
    GgufBuilder builder;
    builder.add("k", type, value);
    return error(builder.build());
  };
  const uint64_t huge = ~uint64_t{0};
  expect_contains(with_value(8, raw(huge)), "cut short");
  expect_contains(with_value(8, raw(huge - 40)), "cut short");
  expect_contains(with_value(9, raw<uint32_t>(4) + raw(huge)), "cannot be in this file");
  expect_contains(with_value(9, raw<uint32_t>(4) + raw(huge / 8)), "cut short");
  expect_contains(with_value(9, raw<uint32_t>(8) + raw(huge)), "cut short");
  expect_contains(with_value(9, raw<uint32_t>(9) + raw<uint64_t>(1)), "nested");
  expect_contains(with_value(13, ""), "value type");
  expect_contains(error("GGUF" + raw<uint32_t>(3) + raw(huge) + raw<uint64_t>(0)), "cut short");
  expect_contains(error("GGUF" + raw<uint32_t>(3) + raw<uint64_t>(0) + raw(huge)), "cut short");

  const auto with_tensor = [&](const std::vector<uint64_t>& extents, uint32_t type,
                               const std::string& data) {
    GgufBuilder builder;
    builder.add_tensor("w", extents, type, data);
    return error(builder.build());
  };
  expect_contains(with_tensor({huge}, 0, ""), "cannot be");
  expect_contains(with_tensor({1 << 30, 1 << 30}, 0, ""), "cannot be");
  expect_contains(with_tensor({0}, 0, ""), "cannot be");
  expect_contains(with_tensor({1, 1, 1, 1, 1}, 0, "1234"), "at most 4 axes");
  expect_contains(with_tensor({1 << 20}, 0, "1234"), "takes 4194304 bytes");
  expect_contains(with_tensor({48}, 3, std::string(40, '\0')), "multiple of 32");
}

TEST_F(GgufTest, RefusesDuplicatesOverlapAndBadAlignment) {
  GgufBuilder keys;
  keys.add_u32("k", 1);
  keys.add_u32("k", 2);
  expect_contains(error(keys.build()), "\"k\" must stand once");
  GgufBuilder tensors;
  tensors.add_f32_tensor("w", {1}, {1});
  tensors.add_f32_tensor("w", {1}, {1});
  expect_contains(error(tensors.build()), "\"w\" must stand once");
  GgufBuilder overlap;
  overlap.add_tensor("a", {16}, 0, "");
  overlap.add_tensor("b", {16}, 0, std::string(64, '\0'));
  expect_contains(error(overlap.build()), "overlap");
  for (const uint32_t alignment : {0u, 12u, 0x80000000u}) {
    GgufBuilder builder;
    builder.add_u32("general.alignment", alignment);
    expect_contains(error(builder.build()), "general.alignment");
  }
  GgufBuilder askew;
  askew.add_tensor("a", {1}, 0, raw(1.0f));
  std::string content = askew.build();
  const size_t offset = content.find("a" + raw<uint32_t>(1)) + 1 + 4 + 8 + 4;
  content[offset] = 4;
  expect_contains(error(content), "offset 4 (a multiple of 32)");
}

}  // namespace
}  // namespace octet::io
