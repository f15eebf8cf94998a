#include "io/peft.h"

#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Shape;
using tensor::TensorView;

TEST(Peft, ReadsTheAdapterOfTheReference) {
  const PeftAdapter adapter = read_peft_adapter(golden_path("peft/adapter"));
  EXPECT_EQ(adapter.config.r, 4);
  EXPECT_EQ(adapter.config.lora_alpha, 8.0);
  EXPECT_EQ(adapter.config.target_modules,
            (std::vector<std::string>{"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj",
                                      "up_proj", "v_proj"}));
  ASSERT_EQ(adapter.modules.size(), 14u);
  const LoraModule& first = adapter.modules[0];
  EXPECT_EQ(first.path, "model.layers.0.mlp.down_proj");
  EXPECT_EQ(first.a.shape, (Shape{4, 128}));
  EXPECT_EQ(first.b.shape, (Shape{64, 4}));
  EXPECT_EQ(first.scale, 2.0);
}

TEST(Peft, WritesWhatItRead) {
  TempFolder folder;
  const PeftAdapter adapter = read_peft_adapter(golden_path("peft/adapter"));
  const std::string copy = folder.path("new/adapter");
  write_peft_adapter(copy, adapter.config, adapter.modules);
  EXPECT_TRUE(read_file(copy + "/adapter_model.safetensors") == read_file(adapter.file->path()));
  const Json written = read_json_file(copy + "/adapter_config.json");
  const Json reference = read_json_file(golden_path("peft/adapter/adapter_config.json"));
  for (const char* key : {"peft_type", "task_type", "r", "lora_alpha", "bias", "use_rslora",
                          "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern",
                          "alpha_pattern", "inference_mode", "init_lora_weights", "lora_dropout"}) {
    EXPECT_EQ(written[key].dump(), reference[key].dump()) << key;
  }
  for (const auto& [key, value] : written.items()) EXPECT_TRUE(reference.contains(key)) << key;
  EXPECT_EQ(read_peft_adapter(copy).modules.size(), 14u);
}

TEST(Peft, ScalesFollowThePatterns) {
  LoraConfig config;
  config.r = 4;
  config.lora_alpha = 8;
  config.rank_pattern = {{"q_proj", 16}, {"layers\\.1\\d?\\.self.*v_proj", 2}};
  config.alpha_pattern = {{"model.layers.0.self_attn.q_proj", 4.0}};
  EXPECT_EQ(lora_rank(config, "model.layers.0.self_attn.k_proj"), 4);
  EXPECT_EQ(lora_rank(config, "model.layers.0.self_attn.q_proj"), 16);
  EXPECT_EQ(lora_rank(config, "model.layers.0.self_attn.xq_proj"), 4);
  EXPECT_EQ(lora_rank(config, "model.layers.1.self_attn.v_proj"), 2);
  EXPECT_EQ(lora_rank(config, "model.layers.11.self_attn.v_proj"), 2);
  EXPECT_EQ(lora_rank(config, "model.layers.21.self_attn.v_proj"), 4);
  EXPECT_EQ(lora_scale(config, "model.layers.0.self_attn.q_proj"), 0.25);
  EXPECT_EQ(lora_scale(config, "model.layers.1.self_attn.q_proj"), 0.5);
  config.rank_pattern = {{"(a+)+[bc]", 2}};
  const std::string path(200, 'a');
  expect_contains(error_of([&] { lora_rank(config, path); }), "match limit");
  config.rank_pattern.clear();
  config.use_rslora = true;
  EXPECT_EQ(lora_scale(config, "model.layers.0.self_attn.k_proj"), 4.0);
}

class PeftFilesTest : public testing::Test {
 protected:
  PeftFilesTest() : values_(64, 0.5f) {}

  TensorView view(const Shape& shape) { return TensorView(values_.data(), DType::kF32, shape); }
  std::string error(const Json& changes, const std::vector<NamedTensor>& tensors) {
    Json config = {{"peft_type", "LORA"},
                   {"r", 2},
                   {"lora_alpha", 4},
                   {"target_modules", {"q"}},
                   {"a_key_of_tomorrow", 1}};
    config.update(changes);
    folder_.write("adapter_config.json", config.dump());
    write_safetensors(folder_.path("adapter_model.safetensors"), tensors);
    return error_of([&] { read_peft_adapter(folder_.path()); });
  }
  std::vector<NamedTensor> good() {
    return {{"base_model.model.l.q.lora_A.weight", view({2, 8})},
            {"base_model.model.l.q.lora_B.weight", view({4, 2})}};
  }

  TempFolder folder_;
  std::vector<float> values_;
};

TEST_F(PeftFilesTest, RefusesWhatChangesTheArithmetic) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{
           {"peft_type", "IA3"},
           {"use_dora", true},
           {"bias", "all"},
           {"lora_bias", true},
           {"modules_to_save", Json::array({"lm_head"})},
           {"fan_in_fan_out", true},
           {"layer_replication", Json::array({Json::array({0, 2})})},
           {"init_lora_weights", "pissa"},
           {"r", 0},
           {"r", "2"},
           {"lora_alpha", -1},
           {"target_modules", 5},
           {"rank_pattern", {{"q", 0}}},
           {"rank_pattern", {{"[", 2}}}}) {
    const std::string name = key == "rank_pattern" ? "" : "\"" + key + "\"";
    expect_contains(error({{key, value}}, good()), name);
  }
}

TEST_F(PeftFilesTest, NamesBadTensors) {
  const std::string prefix = "base_model.model.l.q.";
  expect_contains(error(Json::object(), {}), "there is none");
  expect_contains(error(Json::object(), {good()[0]}), "\"l.q\" needs both");
  expect_contains(error({{"r", 3}}, good()), "lora_A must be [3, in]");
  expect_contains(error({{"rank_pattern", {{"q", 4}}}}, good()), "lora_A must be [4, in]");
  expect_contains(error(Json::object(), {good()[0], {prefix + "lora_B.weight", view({2, 4})}}),
                  "[out, 2]");
  expect_contains(error(Json::object(), {{prefix + "lora_A.weight", view({16})}, good()[1]}),
                  "\"l.q\"");
  for (const char* name :
       {"base_model.model.lm_head.weight", "base_model.model.l.q.lora_magnitude_vector",
        "base_model.model.embed.lora_embedding_A", "l.q.lora_A.weight",
        "base_model.model.lora_A.weight", ".lora_A.weight"}) {
    auto tensors = good();
    tensors.push_back({name, view({2, 8})});
    expect_contains(error(Json::object(), tensors), std::string("\"") + name + "\"");
  }
  expect_contains(error_of([&] { read_peft_adapter(folder_.path("none")); }),
                  "adapter_config.json");
}

}  // namespace
}  // namespace octet::io
