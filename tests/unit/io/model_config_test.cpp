#include "io/model_config.h"

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::Granularity;

// A valid Llama config to change.
Json llama() {
  return {{"model_type", "llama"},    {"vocab_size", 128},
          {"hidden_size", 64},        {"intermediate_size", 96},
          {"num_hidden_layers", 3},   {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-5},     {"hidden_act", "silu"},
          {"rope_theta", 1e4},        {"rope_scaling", nullptr},
          {"torch_dtype", "float16"}, {"eos_token_id", 2}};
}

Json with(Json base, const Json& changes) {
  base.update(changes);
  return base;
}

class ModelConfigTest : public testing::Test {
 protected:
  ModelConfig read(const Json& json) {
    folder_.write("config.json", json.dump());
    return read_model_config(folder_.path());
  }
  std::string error(const Json& changes) {
    return error_of([&] { read(with(llama(), changes)); });
  }
  // What write_model_config makes of it and reads back, as text.
  std::string written(const ModelConfig& config) {
    write_model_config(folder_.path(), config);
    return read_file(folder_.path("config.json"));
  }

  TempFolder folder_;
};

TEST_F(ModelConfigTest, ReadsTheOlderSpelling) {
  const ModelConfig config = read(llama());
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.rope.type, RopeType::kDefault);
  EXPECT_EQ(config.dtype, "float16");
  EXPECT_EQ(config.eos_token_ids, std::vector<int32_t>{2});
  EXPECT_EQ(config.bos_token_id, -1);
  EXPECT_EQ(config.sliding_window, (std::vector<int64_t>{0, 0, 0}));
  EXPECT_FALSE(config.qk_norm || config.attention_bias || config.mlp_bias);
  Json no_kv = llama();
  no_kv.erase("num_key_value_heads");
  EXPECT_EQ(read(no_kv).num_key_value_heads, 4);
  EXPECT_EQ(read(with(llama(), {{"head_dim", 32}})).head_dim, 32);
  EXPECT_EQ(read(with(llama(), {{"eos_token_id", {7, 8}}, {"pad_token_id", -1}})).eos_token_ids,
            (std::vector<int32_t>{7, 8}));
}

TEST_F(ModelConfigTest, BothSpellingsGiveTheSame) {
  const Json scaling = {{"factor", 32.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const Json v4 =
      with(llama(), {{"rope_theta", 5e5}, {"rope_scaling", with(scaling, {{"type", "llama3"}})}});
  Json v5 = with(
      llama(), {{"rope_parameters", with(scaling, {{"rope_type", "llama3"}, {"rope_theta", 5e5}})},
                {"dtype", "float16"}});
  for (const char* key : {"rope_theta", "rope_scaling", "torch_dtype"}) v5.erase(key);
  const ModelConfig config = read(v4);
  EXPECT_EQ(config.rope.type, RopeType::kLlama3);
  EXPECT_EQ(config.rope.theta, 5e5);
  EXPECT_EQ(config.rope.factor, 32.0);
  EXPECT_EQ(config.rope.original_max_position_embeddings, 8192);
  const std::string text = written(config);
  EXPECT_EQ(written(read(v5)), text);
  EXPECT_EQ(written(read(Json::parse(text))), text);
  // The newer spelling wins where a file carries both.
  const Json both = with(v5, {{"rope_theta", 7.0},
                              {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}},
                              {"torch_dtype", "float32"}});
  EXPECT_EQ(written(read(both)), text);
}

TEST_F(ModelConfigTest, WritesWhatBothErasRead) {
  ModelConfig config = read(with(llama(), {{"eos_token_id", {2, 3}}}));
  const Json json = Json::parse(written(config));
  EXPECT_EQ(json["architectures"].dump(), "[\"LlamaForCausalLM\"]");
  EXPECT_EQ(json["torch_dtype"], "float16");
  EXPECT_EQ(json["dtype"], "float16");
  EXPECT_TRUE(json["rope_scaling"].is_null());
  EXPECT_EQ(json["eos_token_id"].dump(), "[2,3]");
  config.rope.type = RopeType::kLinear;
  config.rope.factor = 4;
  EXPECT_EQ(read(Json::parse(written(config))).rope.factor, 4.0);
}

TEST_F(ModelConfigTest, KnowsTheFamilies) {
  const auto read_as = [&](const char* type, const Json& changes) {
    return read(with(with(llama(), {{"model_type", type}}), changes));
  };
  EXPECT_TRUE(read_as("qwen3", {{"attention_bias", false}}).qk_norm);
  const ModelConfig qwen2 = read_as("qwen2", Json::object());
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_output_bias || qwen2.qk_norm);
  const ModelConfig biased = read_as("llama", {{"attention_bias", true}, {"mlp_bias", true}});
  EXPECT_TRUE(biased.attention_bias && biased.attention_output_bias && biased.mlp_bias);

  EXPECT_EQ(read_as("mistral", {{"sliding_window", 8}}).sliding_window,
            (std::vector<int64_t>{8, 8, 8}));
  EXPECT_EQ(read_as("mistral", {{"sliding_window", nullptr}}).sliding_window,
            (std::vector<int64_t>{0, 0, 0}));
  EXPECT_EQ(read_as("llama", {{"sliding_window", 8}}).sliding_window,
            (std::vector<int64_t>{0, 0, 0}));
  const Json off = {{"sliding_window", 8}, {"use_sliding_window", false}};
  EXPECT_EQ(read_as("qwen2", off).sliding_window, (std::vector<int64_t>{0, 0, 0}));
  const Json on = {{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 1}};
  const ModelConfig windowed = read_as("qwen2", on);
  EXPECT_EQ(windowed.sliding_window, (std::vector<int64_t>{0, 8, 8}));
  const Json types = {"sliding_attention", "full_attention", "full_attention"};
  EXPECT_EQ(read_as("qwen3", with(on, {{"layer_types", types}})).sliding_window,
            (std::vector<int64_t>{8, 0, 0}));
  for (const ModelConfig& config :
       {windowed, read_as("mistral", {{"sliding_window", 8}}),
        read_as("mistral", {{"sliding_window", 8}, {"layer_types", types}})}) {
    EXPECT_EQ(read(Json::parse(written(config))).sliding_window, config.sliding_window);
  }
}

TEST_F(ModelConfigTest, NamesTheKeyOfBadInput) {
  expect_contains(error({{"model_type", "gpt_oss"}}), "\"model_type\" must be one of llama");
  expect_contains(error({{"hidden_act", "gelu"}}), "\"hidden_act\" must be \"silu\"");
  expect_contains(error({{"hidden_size", 0}}), "\"hidden_size\" must be a positive integer");
  expect_contains(error({{"hidden_size", "64"}}), "\"hidden_size\" must be an integer");
  expect_contains(error({{"vocab_size", -5}}), "\"vocab_size\"");
  expect_contains(error({{"vocab_size", nullptr}}), "but is missing");
  expect_contains(error({{"vocab_size", 18446744073709551615u}}), "\"vocab_size\"");
  expect_contains(error({{"num_hidden_layers", 100000000}}), "at most 10000");
  expect_contains(error({{"num_key_value_heads", 3}}), "divisor of num_attention_heads (4)");
  expect_contains(error({{"num_attention_heads", 6}}), "head_dim");
  expect_contains(error({{"head_dim", 15}}), "\"head_dim\" must be even");
  expect_contains(error({{"rms_norm_eps", 0}}), "\"rms_norm_eps\"");
  expect_contains(error({{"eos_token_id", "x"}}), "\"eos_token_id\"");
  expect_contains(error({{"eos_token_id", 5000000000}}), "\"eos_token_id\"");
  expect_contains(error({{"tie_word_embeddings", 1}}), "true or false");
  expect_contains(error({{"rope_theta", -1}}), "\"rope_theta\"");
  expect_contains(error({{"rope_interleaved", true}}), "\"rope_interleaved\"");
  expect_contains(error({{"partial_rotary_factor", 0.5}}), "\"partial_rotary_factor\"");
  expect_contains(error({{"rope_scaling", {{"type", "yarn"}, {"factor", 4}}}}), "\"yarn\"");
  expect_contains(error({{"rope_scaling", {{"type", "llama3"}, {"factor", 4}}}}), "low_freq");
  expect_contains(error({{"rope_parameters", {{"full_attention", {{"rope_theta", 1}}}}}}),
                  "one for all layers");
  folder_.write("config.json", "[]");
  expect_contains(error_of([&] { read_model_config(folder_.path()); }), "JSON object");
  expect_contains(error_of([&] { read_model_config(folder_.path("none")); }), "none/config.json");
}

TEST_F(ModelConfigTest, ReadsFp8Schemes) {
  const auto compressed = [](const char* weights, const char* activations) {
    Json group = {
        {"targets", {"Linear"}},
        {"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", weights}}},
        {"input_activations", {{"num_bits", 8}, {"type", "float"}, {"strategy", activations}}}};
    group["weights"]["block_structure"] = {128, 128};
    group["input_activations"]["dynamic"] = std::string_view(activations) != "tensor";
    group["input_activations"]["group_size"] = 128;
    return Json{{"quantization_config",
                 {{"quant_method", "compressed-tensors"},
                  {"ignore", {"lm_head"}},
                  {"config_groups", {{"group_0", group}}}}}};
  };
  EXPECT_FALSE(read(llama()).quantization.has_value());
  QuantizationConfig channel = *read(with(llama(), compressed("channel", "token"))).quantization;
  EXPECT_EQ(channel.weights, Granularity::kRow);
  EXPECT_EQ(channel.activations, Granularity::kRow);
  EXPECT_FALSE(channel.static_activations);
  EXPECT_EQ(channel.ignore, std::vector<std::string>{"lm_head"});
  EXPECT_TRUE(read(with(llama(), compressed("tensor", "tensor"))).quantization->static_activations);
  EXPECT_EQ(read(with(llama(), compressed("block", "group"))).quantization->activations,
            Granularity::kRowBlock);
  expect_contains(error(compressed("group", "token")), "\"strategy\"");

  const Json fp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  EXPECT_EQ(read(with(llama(), {{"quantization_config", fp8}})).quantization->weights,
            Granularity::kBlock);
  EXPECT_EQ(read(with(llama(), {{"quantization_config", {{"quant_method", "fp8"}}}}))
                .quantization->weights,
            Granularity::kTensor);
  expect_contains(error({{"quantization_config", with(fp8, {{"weight_block_size", {64, 64}}})}}),
                  "[128, 128]");
  expect_contains(error({{"quantization_config", {{"quant_method", "gptq"}}}}), "\"gptq\"");
}

TEST_F(ModelConfigTest, ReadsGenerationConfigAndStopTokens) {
  EXPECT_TRUE(read_generation_config(folder_.path()).eos_token_ids.empty());
  folder_.write("generation_config.json",
                R"({"eos_token_id":[5,2],"pad_token_id":0,"do_sample":true,"temperature":0.6,)"
                R"("top_k":20,"top_p":0.95,"min_p":0.1,"transformers_version":"x"})");
  const GenerationConfig generation = read_generation_config(folder_.path());
  EXPECT_EQ(generation.pad_token_id, 0);
  EXPECT_EQ(generation.bos_token_id, std::nullopt);
  EXPECT_EQ(generation.do_sample, true);
  EXPECT_EQ(generation.temperature, 0.6);
  EXPECT_EQ(generation.top_k, 20);
  EXPECT_EQ(generation.top_p, 0.95);
  EXPECT_EQ(generation.min_p, 0.1);
  const ModelConfig model = read(with(llama(), {{"eos_token_id", {2, 9}}}));
  EXPECT_EQ(stop_token_ids(model, generation), (std::vector<int32_t>{5, 2, 9}));
  write_generation_config(folder_.path(), generation);
  const GenerationConfig again = read_generation_config(folder_.path());
  EXPECT_EQ(again.eos_token_ids, generation.eos_token_ids);
  EXPECT_EQ(again.temperature, generation.temperature);
  EXPECT_EQ(again.repetition_penalty, std::nullopt);
  folder_.write("generation_config.json", R"({"temperature":"hot"})");
  expect_contains(error_of([&] { read_generation_config(folder_.path()); }), "\"temperature\"");
}

}  // namespace
}  // namespace octet::io
