// Input that cannot be used: the exit code, and a message that names the place.
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "io/safetensors.h"
#include "system/program.h"
#include "unit/io/gguf_builder.h"

namespace octet::test {
namespace {

namespace fs = std::filesystem;
using tensor::DType;

const std::string kModel = kGolden + "models/qwen3-tiny";
const std::string kNorm = "model.norm.weight";
const std::string kQuery = "model.layers.0.self_attn.q_proj.weight";

// A copy of the tiny model whose tensors a test may change before they are written.
class ModelCopy {
 public:
  ModelCopy() {
    for (const char* name : {"config.json", "generation_config.json", "model.safetensors"}) {
      fs::copy_file(kModel + "/" + name, folder_.path(name));
    }
  }
  std::string path(const std::string& name = "") const { return folder_.path(name); }
  std::string weights() const { return path("model.safetensors"); }

  using Edit = std::function<void(std::vector<io::NamedTensor>& tensors)>;
  void rewrite(const Edit& edit) {
    const io::SafetensorsFile file(kModel + "/model.safetensors");
    std::vector<io::NamedTensor> tensors;
    for (const std::string& name : file.names()) tensors.push_back({name, file.view(name)});
    edit(tensors);
    io::write_safetensors(weights(), tensors);
  }
  Outcome score() const {
    return octet({"score", "--model", path(), "--input", "-", "--json"}, ids_line({1, 2, 3}));
  }

 private:
  TemporaryFolder folder_;
};

void expect_failure(const Outcome& outcome, int exit_code, const std::vector<std::string>& words) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  for (const std::string& word : words) {
    EXPECT_NE(outcome.err.find(word), std::string::npos)
        << "no \"" << word << "\" in: " << outcome.err;
  }
}

io::NamedTensor& find(std::vector<io::NamedTensor>& tensors, const std::string& name) {
  for (io::NamedTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::runtime_error(name);
}

TEST(BadCheckpoint, TheCopyWorks) {
  ModelCopy model;
  model.rewrite([](auto&) {});
  EXPECT_EQ(model.score().exit_code, 0) << model.score().err;
}

TEST(BadCheckpoint, MissingFile) {
  const ModelCopy model;
  fs::remove(model.weights());
  expect_failure(model.score(), 1, {model.path(), "safetensors"});
}

TEST(BadCheckpoint, MissingFolder) {
  expect_failure(octet({"score", "--model", "/nowhere/model", "text"}), 1, {"/nowhere/model"});
}

TEST(BadCheckpoint, TruncatedFile) {
  const ModelCopy model;
  fs::resize_file(model.weights(), fs::file_size(model.weights()) - 100);
  expect_failure(model.score(), 1, {model.weights()});
}

TEST(BadCheckpoint, OverlappingTensors) {
  const ModelCopy model;
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})";
  std::string file(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  write_text(model.weights(), file + header + std::string(12, '\0'));
  expect_failure(model.score(), 1, {model.weights(), "b"});
}

TEST(BadCheckpoint, UnknownTensor) {
  ModelCopy model;
  std::vector<float> values(4, 1.0f);
  model.rewrite([&](auto& tensors) {
    tensors.push_back({"model.extra.weight", tensor::TensorView(values.data(), DType::kF32, {4})});
  });
  expect_failure(model.score(), 1, {"model.extra.weight"});
}

TEST(BadCheckpoint, MissingTensor) {
  ModelCopy model;
  model.rewrite([](auto& tensors) {
    std::erase_if(tensors, [](const io::NamedTensor& t) { return t.name == kQuery; });
  });
  expect_failure(model.score(), 1, {kQuery});
}

TEST(BadCheckpoint, WrongShape) {
  ModelCopy model;
  std::vector<float> values(4, 1.0f);
  model.rewrite([&](auto& tensors) {
    find(tensors, kNorm).view = tensor::TensorView(values.data(), DType::kF32, {4});
  });
  expect_failure(model.score(), 1, {kNorm, "[4]"});
}

TEST(BadCheckpoint, WrongElementType) {
  ModelCopy model;
  std::vector<int32_t> values(4096, 1);
  model.rewrite([&](auto& tensors) {
    io::NamedTensor& norm = find(tensors, kNorm);
    norm.view = tensor::TensorView(values.data(), DType::kI32, norm.view.shape);
  });
  expect_failure(model.score(), 1, {kNorm, "I32"});
}

TEST(BadCheckpoint, NotANumber) {
  ModelCopy model;
  std::vector<float> values(4096, 1.0f);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  model.rewrite([&](auto& tensors) {
    io::NamedTensor& norm = find(tensors, kNorm);
    norm.view = tensor::TensorView(values.data(), DType::kF32, norm.view.shape);
  });
  expect_failure(model.score(), 1, {kNorm, "element 3", "nan"});
}

TEST(BadCheckpoint, AdapterOfAnotherModel) {
  expect_failure(
      octet({"score", "--model", kModel, "--adapter", kGolden + "peft/base", "--input", "-"},
            ids_line({1})),
      1, {"adapter_config.json"});
  expect_failure(octet({"score", "--model", kGolden + "models/llama3-tiny", "--adapter",
                        kGolden + "peft/adapter", "--input", "-"},
                       ids_line({1})),
                 1, {"model.layers.0."});
}

// Lines that cannot be served leave the others' answers as they are.
void check_lines(const std::vector<std::string>& command) {
  const std::string good = ids_line({5, 6, 7});
  const std::string input = good + "{\"ids\":[1,512]}\n" + "{\"ids\":[1,\n" + "[1,2]\n" +
                            "{\"ids\":[]}\n" + "{\"ids\":[-1]}\n" + "{\"ids\":[1.5]}\n" +
                            "{\"text\":\"hello\"}\n" + "{}\n" + "\n" +
                            ids_line(std::vector<int32_t>(41, 3)) + good;
  const Outcome outcome = octet(command, input);
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  const std::vector<Json> lines = outcome.lines();
  ASSERT_EQ(lines.size(), 12u);
  const std::vector<std::string> words = {"512", "line 3",    "line 4",      "one token", "-1",
                                          "1.5", "tokenizer", "exactly one", "line 10",   "41"};
  for (size_t i = 0; i < words.size(); ++i) {
    ASSERT_TRUE(lines[i + 1].contains("error")) << lines[i + 1];
    EXPECT_NE(lines[i + 1]["error"].get<std::string>().find(words[i]), std::string::npos)
        << lines[i + 1];
    EXPECT_NE(lines[i + 1]["error"].get<std::string>().find("line " + std::to_string(i + 2)),
              std::string::npos)
        << lines[i + 1];
  }
  const Outcome alone = octet(command, good);
  EXPECT_EQ(alone.exit_code, 0) << alone.err;
  EXPECT_EQ(lines[0], alone.line(0));
  EXPECT_EQ(lines[11]["ids"].size(), alone.line(0)["ids"].size());
}

TEST(BadLines, Score) {
  check_lines({"score", "--model", kModel, "--input", "-", "--json", "--max-seq-length", "40"});
}

TEST(BadLines, Generate) {
  check_lines({"generate", "--model", kModel, "--input", "-", "--json", "--max-seq-length", "40",
               "--max-new-tokens", "4", "--ignore-eos"});
}

TEST(BadLines, APromptMustLeaveRoom) {
  const std::vector<std::string> command = {"generate",         "--model", kModel,
                                            "--input",          "-",       "--json",
                                            "--max-seq-length", "40",      "--ignore-eos"};
  const Outcome full = octet(command, ids_line(std::vector<int32_t>(40, 3)));
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_NE(full.line(0)["error"].get<std::string>().find("40"), std::string::npos);
  const Outcome almost = octet(command, ids_line(std::vector<int32_t>(39, 3)));
  EXPECT_EQ(almost.exit_code, 0) << almost.err;
  EXPECT_EQ(almost.line(0)["finish_reason"], "length");
}

TEST(BadMemory, ThePlanComesFirst) {
  expect_failure(
      octet({"score", "--model", kModel, "--device-memory-limit", "512KiB", "--input", "-"},
            ids_line({1, 2})),
      1, {"512.00 KiB", "KV pages", "weights", "total"});
  expect_failure(octet({"generate", "--model", kModel, "--device-memory-limit", "8MiB", "--input",
                        "-", "--max-new-tokens", "100000"},
                       ids_line({1, 2})),
                 1, {"8.00 MiB", "KV pages"});
}

// What is advised would help: nothing about lengths where the weights alone do not fit.
TEST(BadMemory, TheAdviceIsForWhatIsLargest) {
  const auto advice = [](const Arguments& more) {
    const Outcome outcome =
        octet(Arguments{"generate", "--model", kModel, "--input", "-"} + more, ids_line({1, 2}));
    expect_failure(outcome, 1, {"the plan needs"});
    return outcome.err.substr(outcome.err.rfind("total"));
  };
  const Arguments weights = {"--device-memory-limit", "10KiB", "--max-new-tokens", "100000"};
  const std::string for_weights = advice(weights);
  for (const char* word : {"before the first token", "a smaller model", "--load-in-fp8",
                           "--device-memory-limit", "another --device"}) {
    EXPECT_NE(for_weights.find(word), std::string::npos) << word << " in: " << for_weights;
  }
  EXPECT_EQ(for_weights.find("--max-seq-length"), std::string::npos) << for_weights;
  EXPECT_EQ(advice(weights + Arguments{"--flow", "fp8_lora"}).find("--load-in-fp8"),
            std::string::npos);
  const Arguments pages = {"--device-memory-limit", "8MiB", "--max-new-tokens", "100000",
                           "--batch-size",          "2"};
  const std::string for_pages = advice(pages);
  EXPECT_NE(for_pages.find("--batch-size or --max-seq-length, --kv-cache-dtype fp8"),
            std::string::npos)
      << for_pages;
  EXPECT_EQ(for_pages.find("a smaller model"), std::string::npos) << for_pages;
  EXPECT_EQ(advice(pages + Arguments{"--kv-cache-dtype", "fp8"}).find("--kv-cache-dtype"),
            std::string::npos);
}

Outcome generate(const std::string& lines, const Arguments& more) {
  const Arguments command = {"generate", "--model", kModel,        "--input",
                             "-",        "--json",  "--ignore-eos"};
  return octet(command + more, lines);
}

// What the plan of such a call needs and a hundredth more, since it is printed rounded.
std::string needs(const std::string& lines, const Arguments& more) {
  const Arguments little = {"--device-memory-limit", "1KiB"};
  const std::string text = generate(lines, more + little).err, before = "the plan needs ";
  const size_t from = text.find(before) + before.size();
  EXPECT_NE(text.find(" MiB:", from), std::string::npos) << text;
  return std::to_string(static_cast<int64_t>(1024 * 1.01 * std::stod(text.substr(from)))) + "KiB";
}

// Unless told how many sequences run at once, it takes as many as fit, and the answers stay.
TEST(BadMemory, FewerSequencesAtOnce) {
  std::string lines;
  for (int32_t i = 0; i < 16; ++i) lines += ids_line({i, 2, 3});
  const std::string limit = needs(lines, {"--max-new-tokens", "500", "--batch-size", "4"});
  const Arguments limited = {"--max-new-tokens", "500", "--device-memory-limit", limit};
  expect_failure(generate(lines, limited + Arguments{"--batch-size", "16"}), 1, {"KV pages"});
  const Outcome chosen = generate(lines, limited);
  EXPECT_EQ(chosen.exit_code, 0) << chosen.err;
  EXPECT_EQ(chosen.out, generate(lines, {"--max-new-tokens", "500"}).out);
}

// The pool has room for what each sequence needs, not for as many of the longest.
TEST(BadMemory, OneLongPromptAmongShortOnes) {
  std::string one, all;
  for (int i = 0; i < 16; ++i) {
    const std::string is_long = ids_line(std::vector<int32_t>(400, 3));
    one += i == 0 ? is_long : ids_line({i, 2, 3});
    all += is_long;
  }
  const Arguments few = {"--max-new-tokens", "2", "--batch-size", "16"};
  const Arguments limited = few + Arguments{"--device-memory-limit", needs(one, few)};
  const Outcome outcome = generate(one, limited);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, generate(one, few).out);
  expect_failure(generate(all, limited), 1, {"KV pages"});
}

// Samples share what is whole of their prompt's pages: 16 of one prompt need less than 16 prompts.
TEST(BadMemory, SamplesOfALongPrompt) {
  std::string all;
  for (int i = 0; i < 16; ++i) all += ids_line(std::vector<int32_t>(400, 3));
  const std::string one = ids_line(std::vector<int32_t>(400, 3));
  const Arguments few = {"--max-new-tokens", "2", "--batch-size", "16"};
  const Arguments samples = few + Arguments{"--n", "16"};
  const Arguments limit = {"--device-memory-limit", needs(one, samples)};
  const Outcome outcome = generate(one, samples + limit);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, generate(one, samples).out);
  expect_failure(generate(all, few + limit), 1, {"KV pages"});
}

// The pool holds what needs most pages: samples of a short prompt with long answers, though a long
// prompt with little room left is as long in the end.
TEST(BadMemory, SamplesOfAShortPromptNeedMorePages) {
  const std::string long_prompt = ids_line(std::vector<int32_t>(400, 3));
  const Arguments samples = {
      "--max-new-tokens", "400", "--max-seq-length", "410", "--batch-size", "16", "--n", "16"};
  const auto kib = [&](const std::string& lines) { return std::stoll(needs(lines, samples)); };
  const std::string both = long_prompt + ids_line({1, 2, 3});
  EXPECT_GT(kib(both), kib(long_prompt) + 100);
  EXPECT_EQ(kib(both), kib(ids_line({1, 2, 3})));
}

TEST(BadGguf, ATypeThatIsNotRead) {
  io::GgufBuilder builder;
  builder.add_string("general.architecture", "llama");
  for (const auto& [key, value] : {std::pair("block_count", 1u),
                                   {"embedding_length", 32u},
                                   {"feed_forward_length", 32u},
                                   {"context_length", 64u},
                                   {"attention.head_count", 2u}}) {
    builder.add_u32(std::string("llama.") + key, value);
  }
  builder.add_f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  builder.add_string("tokenizer.ggml.model", "gpt2");
  builder.add_string("tokenizer.ggml.pre", "smollm");
  builder.add_strings("tokenizer.ggml.tokens", {"a", "<end>"});
  builder.add_i32s("tokenizer.ggml.token_type", {1, 3});
  builder.add_strings("tokenizer.ggml.merges", {});
  builder.add_u32("tokenizer.ggml.bos_token_id", 1);
  builder.add_u32("tokenizer.ggml.eos_token_id", 1);
  for (const char* norm : {"output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"}) {
    builder.add_f32_tensor(std::string(norm) + ".weight", {32}, std::vector<float>(32, 1.0f));
  }
  for (const char* matrix :
       {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
    builder.add_f32_tensor(std::string("blk.0.") + matrix + ".weight", {32, 32},
                           std::vector<float>(1024, 1.0f));
  }
  constexpr uint32_t kIq2Xxs = 16;
  builder.add_tensor("token_embd.weight", {32, 2}, kIq2Xxs, std::string(1024, '\x11'));
  const TemporaryFolder folder;
  write_text(folder.path("model.gguf"), builder.build());
  expect_failure(octet({"import", folder.path("model.gguf"), folder.path("model")}), 1,
                 {"token_embd.weight", "16", "Q8_0"});
  EXPECT_FALSE(fs::exists(folder.path("model")));
}

TEST(BadUsage, UnknownWordsNameTheNearest) {
  expect_failure(octet({"scor"}), 2, {"\"scor\"", "\"score\""});
  expect_failure(octet({"score", "--modle", "x"}), 2, {"--modle", "--model"});
  expect_failure(octet({"generate", "--model", kModel, "--max-new-token", "4", "x"}), 2,
                 {"--max-new-token", "--max-new-tokens"});
  expect_failure(octet({"score"}), 2, {"--model"});
  expect_failure(octet({"score", "--model", kModel, "--batch-size", "two"}), 2, {"--batch-size"});
  expect_failure(octet({"bench", "rollout", "--shape", "smollm2-135m", "--layers", "31"}), 2,
                 {"--layers", "has 30", "31"});
}

TEST(BadUsage, ValuesAreChecked) {
  const auto rejects = [](const Arguments& more, const std::vector<std::string>& words) {
    const Arguments command = {"generate", "--model", kModel, "--input", "-"};
    expect_failure(octet(command + more, ids_line({1})), 2, words);
  };
  rejects({"--load-in-fp8", "block"}, {"--load-in-fp8", "--flow"});
  rejects({"--flow", "bf16", "--load-in-fp8", "tensor"}, {"--load-in-fp8"});
  rejects({"--flow", "fp16"}, {"fp16", "fp8_lora"});
  rejects({"--flow", "fp8_full", "--load-in-fp8", "row"}, {"row", "channel"});
  rejects({"--dtype", "float32", "--flow", "fp8_full"}, {"float32", "fp8_full"});
  rejects({"--dtype", "float32", "--kv-cache-dtype", "fp8"}, {"float32", "fp8"});
  rejects({"--dtype", "float16"}, {"float16"});
  rejects({"--device", "cuda"}, {"CUDA"});
  rejects({"--cpu-isa", "avx3"}, {"avx3"});
  rejects({"--device-memory-limit", "much"}, {"--device-memory-limit", "much"});
  for (const char* temperature : {"-1", "nan", "inf", "1e-38", "1e-60", "1e60"}) {
    rejects({"--temperature", temperature}, {"--temperature", "0, or 1e-06 to 1e+06"});
    expect_failure(octet({"score", "--model", kModel, "--temperature", temperature, "--input", "-"},
                         ids_line({1})),
                   2, {"--temperature", "0, or 1e-06 to 1e+06"});
  }
  rejects({"--stop", ""}, {"--stop", "empty"});
  rejects({"--stop", "a", "--stop", ""}, {"--stop", "empty"});
  rejects({"--top-p", "0"}, {"--top-p"});
  for (const char* seed : {"-1", "18446744073709551616", "1.5", "one"}) {
    rejects({"--seed", seed}, {"--seed", "0 to 18446744073709551615", seed});
  }
  rejects({"--batch-size", "-1"}, {"--batch-size"});
  rejects({"--batch-size", "4097"}, {"--batch-size"});
  rejects({"--max-seq-length", "1000000"}, {"--max-seq-length"});
  rejects({"--max-new-tokens", "0"}, {"--max-new-tokens"});
  rejects({"a text beside --input"}, {"--input", "not both"});
}

TEST(BadUsage, FrozenWeightsHaveNoGradient) {
  expect_failure(octet({"score", "--model", kModel, "--flow", "fp8_lora", "--gradients",
                        "/nowhere/g.safetensors", "--input", "-"},
                       ids_line({1, 2})),
                 2, {"fp8_lora"});
}

}  // namespace
}  // namespace octet::test
