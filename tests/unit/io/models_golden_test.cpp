// The tiny reference models, written by transformers and peft: every tensor that the config implies
// is there with its shape, and nothing else.
#include <fmt/format.h>

#include "io/checkpoint.h"
#include "io/model_config.h"
#include "unit/io/test_files.h"

namespace octet::io {
namespace {

using tensor::DType;

void expect_model(const std::string& folder) {
  const ModelConfig config = read_model_config(folder);
  Checkpoint checkpoint(folder);
  const int64_t hidden = config.hidden_size;
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t key = config.num_key_value_heads * config.head_dim;
  EXPECT_EQ(checkpoint.view("model.embed_tokens.weight", {config.vocab_size, hidden}).dtype,
            DType::kBF16);
  checkpoint.view("model.norm.weight", {hidden});
  if (!config.tie_word_embeddings) checkpoint.view("lm_head.weight", {config.vocab_size, hidden});
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto name = [&](const char* end) { return fmt::format("model.layers.{}.{}", i, end); };
    checkpoint.view(name("input_layernorm.weight"), {hidden});
    checkpoint.view(name("post_attention_layernorm.weight"), {hidden});
    checkpoint.view(name("self_attn.q_proj.weight"), {query, hidden});
    checkpoint.view(name("self_attn.k_proj.weight"), {key, hidden});
    checkpoint.view(name("self_attn.v_proj.weight"), {key, hidden});
    checkpoint.view(name("self_attn.o_proj.weight"), {hidden, query});
    checkpoint.view(name("mlp.gate_proj.weight"), {config.intermediate_size, hidden});
    checkpoint.view(name("mlp.up_proj.weight"), {config.intermediate_size, hidden});
    checkpoint.view(name("mlp.down_proj.weight"), {hidden, config.intermediate_size});
    if (config.qk_norm) {
      checkpoint.view(name("self_attn.q_norm.weight"), {config.head_dim});
      checkpoint.view(name("self_attn.k_norm.weight"), {config.head_dim});
    }
  }
  checkpoint.expect_all_used();
}

TEST(GoldenModels, Load) {
  expect_model(golden_path("models/llama3-tiny"));
  expect_model(golden_path("models/qwen3-tiny"));
  expect_model(golden_path("peft/base"));
}

TEST(GoldenModels, ConfigsSayWhatTransformersSaid) {
  const ModelConfig llama = read_model_config(golden_path("models/llama3-tiny"));
  EXPECT_EQ(llama.rope.type, RopeType::kLlama3);
  EXPECT_EQ(llama.rope.factor, 8.0);
  EXPECT_EQ(llama.rope.original_max_position_embeddings, 64);
  EXPECT_EQ(llama.rope.theta, 500000.0);
  EXPECT_FALSE(llama.tie_word_embeddings);
  const ModelConfig qwen = read_model_config(golden_path("models/qwen3-tiny"));
  EXPECT_EQ(qwen.head_dim, 32);
  EXPECT_TRUE(qwen.tie_word_embeddings);
  EXPECT_TRUE(qwen.qk_norm);
  EXPECT_EQ(qwen.rope.theta, 1e6);
  EXPECT_EQ(stop_token_ids(qwen, read_generation_config(golden_path("models/qwen3-tiny"))),
            std::vector<int32_t>{2});
}

TEST(GoldenModels, LoadSaveLoadGivesTheSameBytes) {
  TempFolder folder;
  for (const char* name : {"models/llama3-tiny", "models/qwen3-tiny", "peft/base"}) {
    const std::string source = golden_path(name);
    Checkpoint checkpoint(source);
    std::vector<NamedTensor> tensors;
    for (const std::string& tensor : checkpoint.names()) {
      tensors.push_back({tensor, checkpoint.view(tensor)});
    }
    write_checkpoint(folder.path(), tensors);
    EXPECT_TRUE(read_file(folder.path("model.safetensors")) ==
                read_file(source + "/model.safetensors"))
        << name;
  }
}

}  // namespace
}  // namespace octet::io
