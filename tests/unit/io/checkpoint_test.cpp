#include "io/checkpoint.h"

#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "io/fp8_linear.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Granularity;
using tensor::Shape;
using tensor::TensorView;

// Four F32 tensors of 16 bytes each, named t0 … t3, filled with their number.
class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() {
    for (int i = 0; i < 4; ++i) {
      std::fill_n(values_[i], 4, static_cast<float>(i));
      tensors_.push_back({fmt::format("t{}", i), TensorView(values_[i], DType::kF32, {4})});
    }
  }

  TempFolder folder_;
  float values_[4][4];
  std::vector<NamedTensor> tensors_;
};

TEST_F(CheckpointTest, ReadsOneFileOrShards) {
  write_checkpoint(folder_.path(), tensors_);
  EXPECT_TRUE(std::filesystem::exists(folder_.path("model.safetensors")));
  EXPECT_EQ(Checkpoint(folder_.path("model.safetensors")).names().size(), 4u);

  write_checkpoint(folder_.path(), tensors_, 32);
  EXPECT_TRUE(std::filesystem::exists(folder_.path("model-00002-of-00002.safetensors")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("model.safetensors"))) << "it is out of date";
  folder_.write("other.safetensors", "not read");
  Checkpoint checkpoint(folder_.path());
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"t0", "t1", "t2", "t3"}));
  EXPECT_EQ(checkpoint.view("t3").as<float>()[2], 3.0f);

  write_checkpoint(folder_.path(), tensors_);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("model.safetensors.index.json")));
  EXPECT_EQ(Checkpoint(folder_.path()).names().size(), 4u);
}

TEST_F(CheckpointTest, CountsWhatIsUsed) {
  write_checkpoint(folder_.path(), tensors_);
  Checkpoint checkpoint(folder_.path());
  checkpoint.view("t1", {4});
  checkpoint.mark_used("t2");
  EXPECT_EQ(checkpoint.unused(), (std::vector<std::string>{"t0", "t3"}));
  expect_contains(error_of([&] { checkpoint.expect_all_used(); }), "2 do not: t0, t3");
  checkpoint.view("t0");
  checkpoint.view("t3");
  checkpoint.expect_all_used();
  expect_contains(error_of([&] {
                    checkpoint.view("t3", {2, 2});
                  }),
                  "\"t3\" must have the shape [2, 2] by config.json, but has [4]");
  expect_contains(error_of([&] { checkpoint.view("tt3"); }), "\"tt3\" is required");
}

TEST_F(CheckpointTest, RefusesAnIndexThatDisagrees) {
  write_checkpoint(folder_.path(), tensors_, 32);
  const auto open_with = [&](const std::string& index) {
    folder_.write("model.safetensors.index.json", index);
    return error_of([&] { Checkpoint checkpoint(folder_.path()); });
  };
  // The shard of t0, t1 … by number.
  const auto open_mapped = [&](std::vector<int> shards) {
    std::vector<std::string> items;
    for (size_t i = 0; i < shards.size(); ++i) {
      items.push_back(fmt::format("\"t{}\":\"model-0000{}-of-00002.safetensors\"", i, shards[i]));
    }
    return open_with(fmt::format("{{\"weight_map\":{{{}}}}}", fmt::join(items, ",")));
  };
  expect_contains(open_with("{}"), "weight_map");
  expect_contains(open_with(R"({"weight_map":{"t0":"../x.safetensors"}})"), "of this folder");
  expect_contains(open_with(R"({"weight_map":{"t0":5}})"), "of this folder");
  expect_contains(open_with(R"({"weight_map":{"t0":"gone.safetensors"}})"), "No such file");
  expect_contains(open_mapped({1, 1, 2}), "\"t3\" of");
  expect_contains(open_mapped({1, 1, 1, 2}), "\"t2\" must be in model-00001");
  expect_contains(open_mapped({1, 1, 2, 2, 2}), "\"t4\" must be in model-00002");
  write_safetensors(folder_.path("model.safetensors"), tensors_);
  expect_contains(open_mapped({1, 1}), "out of date");
}

TEST_F(CheckpointTest, RefusesAnEmptyFolderAndATensorInTwoShards) {
  expect_contains(error_of([&] { Checkpoint checkpoint(folder_.path()); }), "has neither");
  write_safetensors(folder_.path("a.safetensors"), tensors_);
  write_safetensors(folder_.path("b.safetensors"), tensors_);
  folder_.write("model.safetensors.index.json",
                R"({"weight_map":{"t0":"a.safetensors","t1":"b.safetensors"}})");
  expect_contains(error_of([&] { Checkpoint checkpoint(folder_.path()); }), "must be in one file");
}

class Fp8LinearTest : public testing::Test {
 protected:
  // Writes "m.weight" [130, 256] and the given other tensors.
  Checkpoint open(std::vector<NamedTensor> others) {
    codes_.assign(130 * 256, 0x38);
    others.push_back({"m.weight", TensorView(codes_.data(), DType::kE4M3, {130, 256})});
    write_checkpoint(folder_.path(), others);
    return Checkpoint(folder_.path());
  }

  TempFolder folder_;
  std::vector<uint8_t> codes_;
  std::vector<float> scales_ = std::vector<float>(130, 0.5f);
};

TEST_F(Fp8LinearTest, ReadsEveryKindOfScale) {
  uint16_t bf16[4] = {0x3F80, 0x4000, 0x4040, 0x4080};  // 1, 2, 3, 4
  Checkpoint block = open({{"m.weight_scale_inv", TensorView(bf16, DType::kBF16, {2, 2})}});
  EXPECT_TRUE(is_fp8_linear(block, "m"));
  EXPECT_FALSE(is_fp8_linear(block, "n"));
  EXPECT_EQ(block.unused().size(), 2u);
  const Fp8Linear linear = read_fp8_linear(block, "m");
  EXPECT_EQ(linear.granularity, Granularity::kBlock);
  EXPECT_EQ(linear.scales, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(linear.codes.shape, (Shape{130, 256}));
  EXPECT_EQ(linear.input_scale, 0.0f);
  block.expect_all_used();

  for (const Shape& shape : {Shape{130}, Shape{130, 1}}) {
    Checkpoint row = open({{"m.weight_scale", TensorView(scales_.data(), DType::kF32, shape)}});
    EXPECT_EQ(read_fp8_linear(row, "m").granularity, Granularity::kRow);
  }
  uint16_t f16 = 0x3800;  // 0.5
  Checkpoint one = open({{"m.weight_scale", TensorView(&f16, DType::kF16, {})},
                         {"m.input_scale", TensorView(scales_.data(), DType::kF32, {1})}});
  EXPECT_EQ(read_fp8_linear(one, "m").granularity, Granularity::kTensor);
  EXPECT_EQ(read_fp8_linear(one, "m").scales, std::vector<float>{0.5f});
  EXPECT_EQ(read_fp8_linear(one, "m").input_scale, 0.5f);
  one.expect_all_used();
}

TEST_F(Fp8LinearTest, RefusesScalesThatAreMissingMisshapenOrNotPositive) {
  const auto message = [&](const Shape& shape) {
    Checkpoint checkpoint =
        open({{"m.weight_scale", TensorView(scales_.data(), DType::kF32, shape)}});
    return error_of([&] { read_fp8_linear(checkpoint, "m"); });
  };
  expect_contains(message({2, 1}), "m.weight_scale");
  for (const float bad : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    scales_[129] = bad;
    expect_contains(message({130, 1}), "finite and above 0");
  }
  Checkpoint without = open({});
  expect_contains(error_of([&] { read_fp8_linear(without, "m"); }), "m.weight_scale");
  Checkpoint integers = open({{"m.weight_scale", TensorView(scales_.data(), DType::kI32, {1})}});
  expect_contains(error_of([&] { read_fp8_linear(integers, "m"); }), "but is I32");
}

}  // namespace
}  // namespace octet::io
