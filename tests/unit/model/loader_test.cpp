// Filling a model and writing it out: every tensor used, every value finite, bytes kept.
#include "model/loader.h"

#include <bit>
#include <cmath>
#include <map>

#include <gtest/gtest.h>

#include "support/tiny_policy.h"
#include "tensor/codec.h"
#include "unit/io/test_files.h"

namespace octet::model {
namespace {

using io::error_of;
using io::expect_contains;
using io::TempFolder;
using tensor::DType;
using test::TinyOptions;
using test::TinyPolicy;

// A checkpoint as lists of values that a test can spoil before it is written.
struct Draft {
  std::map<std::string, std::pair<tensor::Shape, std::vector<float>>> tensors;

  explicit Draft(TinyPolicy& p) {
    for (const Parameter& parameter : p.model.weights().parameters()) {
      tensors[parameter.name] = {parameter.shape, test::floats_of(*p.backend, parameter.master)};
    }
  }
  void write(const TempFolder& folder) {
    std::vector<io::NamedTensor> named;
    for (auto& [name, entry] : tensors) {
      named.push_back({name, tensor::TensorView(entry.second.data(), DType::kF32, entry.first)});
    }
    io::write_checkpoint(folder.path(), named);
  }
  std::string refusal(const TinyOptions& options) {
    const TempFolder folder;
    write(folder);
    TinyPolicy p(options);
    return error_of([&] {
      io::Checkpoint checkpoint(folder.path());
      load_weights(*p.backend, p.model, checkpoint);
    });
  }
};

const std::string kUp = "model.layers.1.mlp.up_proj.weight";

TEST(Loader, WhatIsWrongWithACheckpointIsNamed) {
  const TinyOptions o;
  TinyPolicy p(o);
  const Draft whole(p);
  Draft draft = whole;
  draft.tensors.erase(kUp);
  expect_contains(draft.refusal(o), kUp);
  draft = whole;
  draft.tensors["model.layers.1.mlp.extra.weight"] = {{2}, {1, 2}};
  expect_contains(draft.refusal(o), "model.layers.1.mlp.extra.weight");
  draft = whole;
  draft.tensors[kUp].first = {200 * 96, 1};
  expect_contains(draft.refusal(o), kUp);
  draft = whole;
  draft.tensors[kUp].second[5] = std::nanf("");
  expect_contains(draft.refusal(o), "finite");
  draft.tensors[kUp].second[5] = HUGE_VALF;
  expect_contains(draft.refusal(o), kUp);
}

// The element type of a file decides no byte: BF16 values come as they are, as F32 and as F16, into
// every form of the weights; what is not finite is named in each.
TEST(Loader, EveryElementTypeGivesTheSameWeights) {
  for (const Flow flow : {Flow::kBf16, Flow::kFp8Full}) {
    for (const Training training : {Training::kNone, Training::kFull}) {
      TinyOptions o;
      o.training = training;
      o.precision.flow = flow;
      std::vector<std::vector<uint8_t>> first;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        const auto load = [&](float spoiled) {
          TinyPolicy p(o);
          std::vector<std::vector<uint32_t>> data;
          std::vector<io::NamedTensor> named;
          for (const Parameter& parameter : p.model.weights().parameters()) {
            auto& words = data.emplace_back(static_cast<size_t>(parameter.shape.num_elements()));
            RandomSequence random({.seed = 8}, RngUse::kTask);
            for (size_t i = 0; i < words.size(); ++i) {
              float value = static_cast<float>(random.next_below(255)) / 256.0f - 0.5f;
              if (parameter.name == kUp && i == 77 && spoiled != 0) value = spoiled;
              if (dtype == DType::kF32) {
                words[i] = std::bit_cast<uint32_t>(value);
              } else {
                reinterpret_cast<uint16_t*>(words.data())[i] =
                    dtype == DType::kBF16 ? tensor::encode_bf16(value) : tensor::encode_f16(value);
              }
            }
            named.push_back(
                {parameter.name, tensor::TensorView(words.data(), dtype, parameter.shape)});
          }
          const TempFolder folder;
          io::write_checkpoint(folder.path(), named);
          io::Checkpoint checkpoint(folder.path());
          load_weights(*p.backend, p.model, checkpoint);
          return test::weight_bytes(p);
        };
        const auto bytes = load(0);
        if (first.empty()) first = bytes;
        EXPECT_TRUE(bytes == first) << tensor::dtype_name(dtype);
        for (const float spoiled : {std::nanf(""), -HUGE_VALF}) {
          const std::string message = error_of([&] { load(spoiled); });
          expect_contains(message, kUp);
          expect_contains(message, "element 77 is");
        }
      }
    }
  }
}

TEST(Loader, ATiedModelTakesAFileThatAlsoHoldsTheHead) {
  TinyOptions o;
  o.tied = true;
  TinyPolicy p(o);
  Draft draft(p);
  draft.tensors["lm_head.weight"] = draft.tensors["model.embed_tokens.weight"];
  const TempFolder folder;
  draft.write(folder);
  TinyOptions other = o;
  other.seed = 50;
  TinyPolicy loaded(other);
  io::Checkpoint checkpoint(folder.path());
  load_weights(*loaded.backend, loaded.model, checkpoint);
  EXPECT_TRUE(test::weight_bytes(loaded) == test::weight_bytes(p));
}

// An FP8 checkpoint: codes and scales of every linear as the given model holds them.
void write_fp8(TinyPolicy& p, const TempFolder& folder, int64_t spoiled_code = -1) {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<io::NamedTensor> named;
  const auto add = [&](const std::string& name, const tensor::TensorView& view,
                       const tensor::Shape& shape) {
    bytes.push_back(test::bytes_of(*p.backend, view));
    if (view.dtype == DType::kE4M3 && name == kUp && spoiled_code >= 0) {
      bytes.back()[static_cast<size_t>(spoiled_code)] = 0xFF;
    }
    named.push_back({name, tensor::TensorView(bytes.back().data(), view.dtype, shape)});
  };
  for (const Parameter& parameter : p.model.weights().parameters()) {
    if (parameter.kind == ParameterKind::kLora) continue;
    if (parameter.quantized.empty()) {
      add(parameter.name, parameter.dense, parameter.shape);
      continue;
    }
    const tensor::TensorView& scales = parameter.quantized.scales;
    const bool rows = parameter.quantized.granularity == tensor::Granularity::kRow;
    add(parameter.name, parameter.quantized.codes, parameter.shape);
    add(parameter.name + "_scale", scales,
        rows ? tensor::Shape{parameter.shape[0], 1} : scales.shape);
  }
  io::write_checkpoint(folder.path(), named);
}

TEST(Loader, Fp8CodesAreTakenAsTheyAreOrDequantised) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    TinyOptions o;
    o.training = Training::kNone;
    o.inner = 300;
    o.precision.flow = Flow::kFp8Lora;
    o.precision.scales = scales;
    TinyPolicy p(o);
    for (Parameter& parameter : p.model.weights().parameters()) {
      if (parameter.quantized.empty()) continue;  // scales that are not our quantiser's
      auto values = test::floats_of(*p.backend, parameter.quantized.scales);
      for (float& value : values) value *= 1.37f;
      p.backend->upload(values.data(), parameter.quantized.scales);
    }
    const TempFolder folder;
    write_fp8(p, folder);
    const auto load = [&](TinyOptions options) {
      options.seed = 50;
      auto loaded = std::make_unique<TinyPolicy>(options);
      io::Checkpoint checkpoint(folder.path());
      load_weights(*loaded->backend, loaded->model, checkpoint);
      return loaded;
    };
    EXPECT_TRUE(test::weight_bytes(*load(o)) == test::weight_bytes(p))
        << weight_scales_name(scales);

    TinyOptions dense = o;
    dense.precision.flow = Flow::kBf16;
    const auto loaded = load(dense);
    std::vector<uint16_t> expected(300 * 96), given(300 * 96);
    tensor::Buffer buffer = p.backend->allocator().allocate(DType::kBF16, {300, 96}, "test");
    p.backend->dequantize({p.parameter(kUp).quantized, buffer.view(DType::kBF16, {300, 96})});
    p.backend->download(buffer.view(DType::kBF16, {300, 96}), expected.data());
    loaded->backend->download(loaded->parameter(kUp).dense, given.data());
    EXPECT_EQ(given, expected);
  }
}

TEST(Loader, ANanCodeIsRefused) {
  TinyOptions o;
  o.training = Training::kNone;
  o.precision.flow = Flow::kFp8Lora;
  TinyPolicy p(o);
  const TempFolder folder;
  write_fp8(p, folder, 123);
  for (const Flow flow : {Flow::kFp8Lora, Flow::kBf16}) {
    o.precision.flow = flow;
    TinyPolicy loaded(o);
    const std::string message = error_of([&] {
      io::Checkpoint checkpoint(folder.path());
      load_weights(*loaded.backend, loaded.model, checkpoint);
    });
    expect_contains(message, kUp);
    expect_contains(message, "element 123 is NaN");
  }
}

TinyOptions with_adapters() {
  TinyOptions o;
  o.training = Training::kLora;
  o.lora_rank = 4;
  return o;
}

TEST(Loader, AdaptersSavedAndLoadedAreEqualBytes) {
  for (const Flow flow : {Flow::kBf16, Flow::kFp8Lora}) {
    TinyOptions o = with_adapters();
    o.precision.flow = flow;
    TinyPolicy p(o);
    const TempFolder folder;
    save_adapters(*p.backend, p.model, folder.path());
    const io::PeftAdapter adapter = io::read_peft_adapter(folder.path());
    EXPECT_EQ(adapter.config.r, 4);
    EXPECT_EQ(adapter.config.lora_alpha, 8.0);
    TinyPolicy loaded(o);
    init_adapters(*loaded.backend, loaded.model, 1234);
    EXPECT_NE(test::weight_bytes(loaded), test::weight_bytes(p));
    load_adapters(*loaded.backend, loaded.model, adapter);
    EXPECT_TRUE(test::weight_bytes(loaded) == test::weight_bytes(p));
    const TempFolder again;
    save_adapters(*loaded.backend, loaded.model, again.path());
    for (const char* name : {"adapter_config.json", "adapter_model.safetensors"}) {
      EXPECT_EQ(read_file(again.path(name)), read_file(folder.path(name))) << name;
    }
  }
}

TEST(Loader, AnAdapterOfAnotherModelIsRefused) {
  TinyPolicy p(with_adapters());
  const TempFolder folder;
  save_adapters(*p.backend, p.model, folder.path());
  const io::PeftAdapter adapter = io::read_peft_adapter(folder.path());
  const auto refusal = [&](const TinyOptions& options) {
    TinyPolicy other(options);
    return error_of([&] { load_adapters(*other.backend, other.model, adapter); });
  };
  TinyOptions wider = with_adapters();
  wider.inner = 208;
  expect_contains(refusal(wider), "[4, 200]");
  TinyOptions shallower = with_adapters();
  shallower.layers = 1;
  expect_contains(refusal(shallower), "model.layers.1.");
  TinyOptions deeper = with_adapters();
  deeper.layers = 3;
  expect_contains(refusal(deeper), "model.layers.2.");
}

TEST(Loader, AdaptedModulesAreThoseOfPeft) {
  const std::string path = "model.layers.3.self_attn.q_proj";
  const auto targets = [&](std::vector<std::string> modules, const std::string& pattern = "") {
    io::LoraConfig config;
    config.target_modules = std::move(modules);
    config.target_pattern = pattern;
    return io::lora_targets(config, path);
  };
  EXPECT_TRUE(targets({"q_proj"}));
  EXPECT_TRUE(targets({"self_attn.q_proj"}));
  EXPECT_TRUE(targets({"v_proj", path}));
  EXPECT_FALSE(targets({"proj", "v_proj", "attn.q_proj", "layers.3"}));
  EXPECT_TRUE(targets({}, "all-linear"));
  EXPECT_TRUE(targets({}, R"(.*\.[0-3]\.self_attn\.(q|v)_proj)"));
  EXPECT_FALSE(targets({}, R"(.*\.[0-2]\.self_attn\.(q|v)_proj)"));
  EXPECT_FALSE(targets({}, "q_proj"));  // a pattern matches the whole path
}

TEST(Loader, APatternGivesAdaptersToItsModulesOnly) {
  const TempFolder folder;
  io::LoraConfig config;
  config.r = 2;
  config.target_pattern = R"(model\.layers\.1\..*\.(q_proj|down_proj))";
  const TinyOptions o;
  auto backend = cpu::make_cpu_backend({.num_threads = 1});
  Model model(backend->allocator(), o.config(), o.precision, Training::kLora, config);
  init_adapters(*backend, model, 5);
  std::vector<std::string> adapted;
  for (const LinearLayer* layer : model.linear_layers()) {
    if (!layer->lora.empty()) adapted.push_back(layer->module);
  }
  EXPECT_EQ(adapted, (std::vector<std::string>{"model.layers.1.self_attn.q_proj",
                                               "model.layers.1.mlp.down_proj"}));
  save_adapters(*backend, model, folder.path());
  const io::PeftAdapter adapter = io::read_peft_adapter(folder.path());
  Model other(backend->allocator(), o.config(), o.precision, Training::kNone, adapter.config);
  EXPECT_NO_THROW(load_adapters(*backend, other, adapter));
}

TEST(Loader, AStartIsAFunctionOfTheSeed) {
  const TinyOptions o = with_adapters();
  TinyPolicy a(o), b(o);
  EXPECT_TRUE(test::weight_bytes(a) == test::weight_bytes(b));
  init_weights(*b.backend, b.model, o.seed + 1, 0.1);
  EXPECT_NE(test::weight_bytes(a), test::weight_bytes(b));
  // Neighbours differ, and the deviation is the one asked for.
  Model model(a.backend->allocator(), o.config(), {}, Training::kFull, std::nullopt);
  init_weights(*a.backend, model, 7, 0.02);
  const auto up = test::floats_of(*a.backend, model.weights().find(kUp)->master);
  const auto gate = test::floats_of(
      *a.backend, model.weights().find("model.layers.1.mlp.gate_proj.weight")->master);
  EXPECT_NE(up, gate);
  double squares = 0;
  for (const float v : up) squares += static_cast<double>(v) * v;
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(up.size())), 0.02, 0.0005);
}

}  // namespace
}  // namespace octet::model
