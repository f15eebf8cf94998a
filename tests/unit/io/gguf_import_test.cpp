#include "io/gguf_import.h"

#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <numeric>

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "io/checkpoint.h"
#include "io/model_config.h"
#include "tensor/codec.h"
#include "unit/io/gguf_builder.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;
using tensor::Shape;

// A model of one layer: hidden 32, two heads of 8 over one key-value head, five tokens.
struct Model {
  std::string architecture = "llama";
  std::string tokenizer = "gpt2";
  std::string pre = "smollm";
  std::vector<std::string> tokens = {"a", "b", "ab", "<end>", "<tool>", "[PAD]"};
  std::vector<int32_t> types = {1, 1, 1, 3, 4, 5};
  std::vector<std::string> merges = {"a b"};
  std::string without = {};  // a tensor that is left out
  uint32_t value_type = 0;   // of attn_v
  std::vector<float> rope_factors = {};
  bool output = false;
  bool add_bos = false;

  std::string build() const {
    GgufBuilder builder;
    const auto key = [&](const char* name) { return architecture + "." + name; };
    builder.add_string("general.architecture", architecture);
    builder.add_u32(key("block_count"), 1);
    builder.add_u32(key("embedding_length"), 32);
    builder.add_u32(key("feed_forward_length"), 64);
    builder.add_u32(key("context_length"), 128);
    builder.add_u32(key("attention.head_count"), 2);
    builder.add_u32(key("attention.head_count_kv"), 1);
    builder.add_u32(key("attention.key_length"), 8);
    builder.add_f32(key("attention.layer_norm_rms_epsilon"), 1e-5f);
    builder.add_f32(key("rope.freq_base"), 500000.0f);
    builder.add_string("tokenizer.ggml.model", tokenizer);
    builder.add_string("tokenizer.ggml.pre", pre);
    builder.add_strings("tokenizer.ggml.tokens", tokens);
    builder.add_i32s("tokenizer.ggml.token_type", types);
    builder.add_strings("tokenizer.ggml.merges", merges);
    builder.add_u32("tokenizer.ggml.bos_token_id", 3);
    builder.add_u32("tokenizer.ggml.eos_token_id", 3);
    builder.add_u32("tokenizer.ggml.eot_token_id", 4);
    if (add_bos) builder.add_bool("tokenizer.ggml.add_bos_token", true);
    builder.add_string("tokenizer.chat_template", "{{ messages }}");
    const auto add = [&](const std::string& name, uint64_t columns, uint64_t rows, float start) {
      if (name == without) return;
      std::vector<float> values(columns * std::max<uint64_t>(rows, 1));
      std::iota(values.begin(), values.end(), start);
      std::vector<uint64_t> extents = {columns};
      if (rows > 0) extents.push_back(rows);
      builder.add_f32_tensor(name, extents, values);
    };
    add("token_embd.weight", 32, 6, 0.1f);
    add("output_norm.weight", 32, 0, 1);
    if (output) add("output.weight", 32, 6, 2);
    add("blk.0.attn_norm.weight", 32, 0, 3);
    add("blk.0.ffn_norm.weight", 32, 0, 4);
    add("blk.0.attn_q.weight", 32, 16, 0);
    add("blk.0.attn_k.weight", 32, 8, 0);
    if (without != "blk.0.attn_v.weight") {
      builder.add_tensor("blk.0.attn_v.weight", {32, 8}, value_type, std::string(1024, '\x11'));
    }
    add("blk.0.attn_output.weight", 16, 32, 5);
    if (architecture == "qwen2") {
      add("blk.0.attn_q.bias", 16, 0, 6);
      add("blk.0.attn_k.bias", 8, 0, 7);
      add("blk.0.attn_v.bias", 8, 0, 8);
    }
    if (architecture == "qwen3") {
      add("blk.0.attn_q_norm.weight", 8, 0, 6);
      add("blk.0.attn_k_norm.weight", 8, 0, 7);
    }
    add("blk.0.ffn_gate.weight", 32, 64, 9);
    add("blk.0.ffn_up.weight", 32, 64, 10);
    add("blk.0.ffn_down.weight", 64, 32, 11);
    if (!rope_factors.empty()) {
      builder.add_f32_tensor("rope_freqs.weight", {rope_factors.size()}, rope_factors);
    }
    return builder.build();
  }
};

class ImportTest : public testing::Test {
 protected:
  std::string import(const Model& model, ImportDtype dtype = ImportDtype::kKeep) {
    const std::string folder = folder_.path("out" + std::to_string(++count_));
    import_gguf(folder_.write("a.gguf", model.build()), folder, {dtype});
    return folder;
  }
  std::string error(const Model& model) {
    const std::string folder = folder_.path("bad");
    const std::string path = folder_.write("a.gguf", model.build());
    const std::string message = error_of([&] { import_gguf(path, folder); });
    EXPECT_FALSE(std::filesystem::exists(folder));
    EXPECT_FALSE(std::filesystem::exists(folder + ".tmp"));
    return message;
  }

  TempFolder folder_;
  int count_ = 0;
};

TEST_F(ImportTest, WritesAConfigAndEveryTensor) {
  const std::string folder = import({});
  const ModelConfig config = read_model_config(folder);
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.vocab_size, 6);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_key_value_heads, 1);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rope.theta, 500000.0);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.eos_token_ids, std::vector<int32_t>{3});
  EXPECT_EQ(config.dtype, "float32");
  EXPECT_EQ(read_generation_config(folder).eos_token_ids, (std::vector<int32_t>{3, 4}));
  Checkpoint checkpoint(folder);
  EXPECT_EQ(checkpoint.names().size(), 11u);
  EXPECT_EQ(checkpoint.view("model.embed_tokens.weight", {6, 32}).as<float>()[33], 33.1f);
  EXPECT_EQ(checkpoint.view("model.layers.0.mlp.down_proj.weight", {32, 64}).as<float>()[1], 12.0f);
  EXPECT_FALSE(std::filesystem::exists(folder + ".tmp"));

  Model untied;
  untied.output = true;
  const std::string second = import(untied);
  EXPECT_FALSE(read_model_config(second).tie_word_embeddings);
  EXPECT_TRUE(Checkpoint(second).has("lm_head.weight"));
}

// The converter stores W.reshape(heads, 2, d/2, in).swapaxes(1, 2): row 2j + t from t·(d/2) + j.
TEST_F(ImportTest, UndoesThePermutationOfLlamaOnly) {
  const auto first_columns = [](const std::string& folder, const char* name) {
    Checkpoint checkpoint(folder);
    const auto view = checkpoint.view(std::string("model.layers.0.self_attn.") + name);
    std::vector<int> rows;
    for (int64_t row = 0; row < view.rows(); ++row) {
      rows.push_back(static_cast<int>(*view.row<float>(row)) / 32);  // the row it came from
    }
    return rows;
  };
  const std::string llama = import({});
  EXPECT_EQ(first_columns(llama, "q_proj.weight"),
            (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15}));
  EXPECT_EQ(first_columns(llama, "k_proj.weight"), (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7}));
  const std::string qwen = import({.architecture = "qwen3", .pre = "qwen2"});
  EXPECT_EQ(first_columns(qwen, "k_proj.weight"), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(Checkpoint(qwen).has("model.layers.0.self_attn.q_norm.weight"));
  const std::string biased = import({.architecture = "qwen2", .pre = "qwen2"});
  EXPECT_TRUE(read_model_config(biased).attention_bias);
  Checkpoint checkpoint(biased);
  EXPECT_EQ(checkpoint.view("model.layers.0.self_attn.k_proj.bias", {8}).as<float>()[1], 8.0f);
}

TEST_F(ImportTest, KeepsOrConvertsElementTypes) {
  const char* name = "model.layers.0.self_attn.v_proj.weight";
  const Model f16 = {.value_type = 1};
  Checkpoint kept(import(f16));
  EXPECT_EQ(kept.view(name).dtype, DType::kF16);
  EXPECT_EQ(kept.view(name).as<uint16_t>()[0], 0x1111);
  Checkpoint single(import(f16, ImportDtype::kFloat32));
  EXPECT_EQ(single.view(name).as<float>()[255], tensor::decode_f16(0x1111));
  Checkpoint half(import(f16, ImportDtype::kBFloat16));
  EXPECT_EQ(half.view(name).as<uint16_t>()[7], tensor::encode_bf16(tensor::decode_f16(0x1111)));
  for (const std::string& tensor : half.names()) EXPECT_EQ(half.view(tensor).dtype, DType::kBF16);
  EXPECT_EQ(half.view("model.embed_tokens.weight").as<uint16_t>()[1], tensor::encode_bf16(1.1f));
  EXPECT_EQ(read_model_config(half.path()).dtype, "bfloat16");
  Checkpoint quantized(import({.value_type = 8}));
  const float value = 17.0f * tensor::decode_f16(0x1111);
  EXPECT_EQ(quantized.view(name, {8, 32}).dtype, DType::kF32);
  EXPECT_EQ(quantized.view(name).as<float>()[100], value);
}

TEST_F(ImportTest, FindsTheLlama3Rope) {
  std::vector<float> factors;
  for (int i = 0; i < 4; ++i) {
    const double wavelength = 2 * std::numbers::pi * std::pow(500000.0, i / 4.0);
    const double smooth = (8192 / wavelength - 1) / 3;
    factors.push_back(static_cast<float>(wavelength < 2048   ? 1
                                         : wavelength > 8192 ? 8
                                                             : 1 / ((1 - smooth) / 8 + smooth)));
  }
  ASSERT_NE(factors[2], 1.0f);
  const RopeConfig rope = read_model_config(import({.rope_factors = factors})).rope;
  EXPECT_EQ(rope.type, RopeType::kLlama3);
  EXPECT_EQ(rope.factor, 8.0);
  EXPECT_EQ(rope.original_max_position_embeddings, 8192);
  factors[1] = 2;
  expect_contains(error({.rope_factors = factors}), "llama3 rule");
  expect_contains(error({.rope_factors = {1, 8}}), "must have 4 values");
}

TEST_F(ImportTest, WritesTheTokenizer) {
  const std::string folder = import({});
  const Json json = read_json_file(folder + "/tokenizer.json");
  EXPECT_EQ(json["model"]["vocab"].dump(), R"({"a":0,"b":1,"ab":2,"<end>":3,"<tool>":4})");
  EXPECT_EQ(json["model"]["merges"].dump(), R"([["a","b"]])");
  EXPECT_FALSE(json["model"]["ignore_merges"].get<bool>());
  ASSERT_EQ(json["added_tokens"].size(), 2u);
  EXPECT_EQ(json["added_tokens"][0]["content"], "<end>");
  EXPECT_TRUE(json["added_tokens"][0]["special"].get<bool>());
  EXPECT_FALSE(json["added_tokens"][1]["special"].get<bool>());
  EXPECT_EQ(json["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
  EXPECT_TRUE(json["pre_tokenizer"]["pretokenizers"][1]["use_regex"].get<bool>());
  EXPECT_EQ(json["post_processor"]["type"], "ByteLevel");
  const Json config = read_json_file(folder + "/tokenizer_config.json");
  EXPECT_EQ(config["eos_token"], "<end>");
  EXPECT_TRUE(config["pad_token"].is_null());
  EXPECT_EQ(config["chat_template"], "{{ messages }}");

  const Json qwen = read_json_file(import({.pre = "qwen2"}) + "/tokenizer.json");
  EXPECT_EQ(qwen["normalizer"]["type"], "NFC");
  EXPECT_EQ(
      qwen["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)");
  const Json llama = read_json_file(import({.pre = "llama-bpe"}) + "/tokenizer.json");
  EXPECT_TRUE(llama["model"]["ignore_merges"].get<bool>());
  expect_contains(llama["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
                  R"(|\p{N}{1,3}|)");
  const Json post = llama["post_processor"]["processors"][1];
  EXPECT_EQ(post["single"].dump(), R"([{"SpecialToken":{"id":"<end>","type_id":0}},)"
                                   R"({"Sequence":{"id":"A","type_id":0}}])");
  EXPECT_EQ(post["special_tokens"]["<end>"]["ids"].dump(), "[3]");
  const Json gpt2 = read_json_file(import({.pre = "gpt-2", .add_bos = true}) + "/tokenizer.json");
  EXPECT_EQ(gpt2["pre_tokenizer"]["type"], "ByteLevel");
  EXPECT_EQ(gpt2["post_processor"]["processors"][1]["type"], "TemplateProcessing");
}

TEST_F(ImportTest, NamesWhatIsNotRead) {
  expect_contains(error({.architecture = "gemma3"}), "\"gemma3\"");
  expect_contains(error({.tokenizer = "llama"}), "\"llama\", which is not read yet");
  expect_contains(error({.pre = "deepseek"}), "\"deepseek\"");
  expect_contains(error({.value_type = 14}), "Q6_K");
}

TEST_F(ImportTest, RefusesADamagedModel) {
  expect_contains(error({.without = "blk.0.attn_v.weight"}), "\"blk.0.attn_v.weight\" is required");
  expect_contains(error({.without = "blk.0.ffn_up.weight"}), "\"blk.0.ffn_up.weight\" is required");
  expect_contains(error({.without = "token_embd.weight"}), "\"token_embd.weight\" is required");
  expect_contains(error({.value_type = 26}), "I32");
  expect_contains(error({.types = {1, 1}}), "2 types are given");
  expect_contains(error({.tokens = {"a", "a", "ab", "<end>", "<tool>", "[PAD]"}}), "stands twice");
  expect_contains(error({.tokens = {"a", "\xFF", "ab", "<end>", "<tool>", "[PAD]"}}), "UTF-8");
  expect_contains(error({.merges = {"a x"}}), "\"a x\" does not");
  expect_contains(error({.merges = {"ab"}}), "\"ab\" does not");
  expect_contains(error({.tokens = {"a", "b", "ab"}, .types = {1, 1, 1}}), "bos_token_id");
}

TEST_F(ImportTest, ProtectsTheDestination) {
  const std::string path = folder_.write("a.gguf", Model().build());
  std::filesystem::create_directory(folder_.path("full"));
  folder_.write("full/mine.txt", "x");
  expect_contains(error_of([&] { import_gguf(path, folder_.path("full")); }), "must not exist");
  expect_contains(error_of([&] { import_gguf(path, path); }), "must not exist");
  expect_contains(error_of([&] { import_gguf(path, path + "/sub"); }), "cannot be made");
  EXPECT_EQ(read_file(folder_.path("full/mine.txt")), "x");
  std::filesystem::create_directory(folder_.path("empty"));
  import_gguf(path, folder_.path("empty") + "/");
  EXPECT_TRUE(std::filesystem::exists(folder_.path("empty/config.json")));

  std::filesystem::create_directory(folder_.path("new.tmp"));
  folder_.write("new.tmp/mine.txt", "x");
  expect_contains(error_of([&] { import_gguf(path, folder_.path("new")); }), "is taken");
  std::filesystem::rename(folder_.path("new.tmp/mine.txt"), folder_.path("new.tmp/config.json"));
  import_gguf(path, folder_.path("new"));  // what an import left behind is replaced
  EXPECT_FALSE(std::filesystem::exists(folder_.path("new.tmp")));
}

}  // namespace
}  // namespace octet::io
