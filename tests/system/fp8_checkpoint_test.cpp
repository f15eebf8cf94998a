// A checkpoint that is FP8 already is run by its own scheme.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "io/safetensors.h"
#include "system/program.h"

namespace octet::test {
namespace {

using tensor::DType;
using tensor::Granularity;

const std::string kModel = kGolden + "models/qwen3-tiny";

// Writes the tiny model as an FP8 checkpoint with one scale per 128 × 128 weights.
void write_block_checkpoint(const std::string& folder) {
  const auto backend = cpu::make_cpu_backend({.num_threads = 1});
  const io::SafetensorsFile file(kModel + "/model.safetensors");
  std::vector<io::NamedTensor> tensors;
  std::vector<tensor::Buffer> buffers;
  const auto make = [&](DType dtype, const tensor::Shape& shape) {
    buffers.push_back(backend->allocator().allocate(dtype, shape, "test"));
    return buffers.back().view(dtype, shape);
  };
  for (const std::string& name : file.names()) {
    const tensor::TensorView view = file.view(name);
    if (name.find("_proj.") == std::string::npos) {
      tensors.push_back({name, view});
      continue;
    }
    const tensor::Shape scales =
        tensor::scale_shape(Granularity::kBlock, view.shape[0], view.shape[1]);
    const tensor::QuantizedView out{make(DType::kE4M3, view.shape), make(DType::kF32, scales),
                                    Granularity::kBlock};
    backend->quantize({.x = view, .column_scale = {}, .out = out});
    tensors.push_back({name, out.codes});
    tensors.push_back({name + "_scale_inv", out.scales});
  }
  io::write_safetensors(folder + "/model.safetensors", tensors);
  Json config = Json::parse(read_text(kModel + "/config.json"));
  config["quantization_config"] = {{"quant_method", "fp8"},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", "dynamic"},
                                   {"weight_block_size", {128, 128}}};
  write_text(folder + "/config.json", config.dump());
}

TEST(Fp8Checkpoint, GivesTheBytesOfQuantisingWhileLoading) {
  const TemporaryFolder folder;
  write_block_checkpoint(folder.path());
  std::vector<int32_t> sequence;
  for (int i = 0; i < 40; ++i) sequence.push_back(53 * i % 512);
  const auto score = [&](const std::string& model, const Arguments& more) {
    const Arguments arguments = {"score", "--model", model, "--input", "-", "--json"};
    const Outcome outcome = octet(arguments + more, ids_line(sequence));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string own = score(folder.path(), {});
  EXPECT_EQ(own, score(kModel, {"--flow", "fp8_full", "--load-in-fp8", "block"}));
  EXPECT_NE(own, score(folder.path(), {"--flow", "bf16"}));
  EXPECT_NE(own, score(folder.path(), {"--load-in-fp8", "channel"}));
}

TEST(Fp8Checkpoint, StaticActivationScalesAreRefused) {
  const TemporaryFolder folder;
  write_block_checkpoint(folder.path());
  Json config = Json::parse(read_text(folder.path("config.json")));
  config["quantization_config"] = {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
  write_text(folder.path("config.json"), config.dump());
  const Outcome outcome =
      octet({"score", "--model", folder.path(), "--input", "-"}, ids_line({1, 2}));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("static"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace octet::test
