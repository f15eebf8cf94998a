// Conversations rendered by transformers 5.17 with the templates of real models.
#include <filesystem>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "text/chat_template.h"

namespace octet::text {
namespace {

void expect_rendered(const std::string& path) {
  const Json golden = read_json_file(path);
  const std::string key = golden.contains("template") ? "template" : "chat_template";
  const ChatTemplate chat = ChatTemplate::parse(golden[key].get<std::string>(), path);
  const auto token = [&](const char* name) {
    return golden.contains(name) && golden[name].is_string() ? golden[name].get<std::string>() : "";
  };
  const std::string bos = token("bos_token"), eos = token("eos_token");
  ASSERT_GE(golden["cases"].size(), 4u);
  for (const Json& row : golden["cases"]) {
    Json kwargs = row["kwargs"];
    const bool add = kwargs.value("add_generation_prompt", false);
    kwargs.erase("add_generation_prompt");
    const Json* tools = kwargs.contains("tools") ? &kwargs["tools"] : nullptr;
    EXPECT_EQ(chat.render({.messages = row["messages"],
                           .add_generation_prompt = add,
                           .tools = tools,
                           .kwargs = &kwargs,
                           .bos_token = bos,
                           .eos_token = eos}),
              row["text"].get<std::string>());
  }
}

TEST(ChatTemplateGolden, RendersQwen3) {
  expect_rendered(OCTET_SOURCE_DIR "/tests/golden/data/chat_template/qwen3.json");
}

TEST(ChatTemplateGolden, RendersSmolLm2) {
  expect_rendered(OCTET_SOURCE_DIR "/tests/golden/data/smollm2/chat_template.json");
}

TEST(ChatTemplateGolden, RendersGemma3) {
  const std::string path = OCTET_SOURCE_DIR "/../shared/data/golden/chat_template/gemma3.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "the file is not there: " << path;
  expect_rendered(path);
}

}  // namespace
}  // namespace octet::text
