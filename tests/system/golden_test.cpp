// `octet score` and `octet generate` under --dtype float32 against reference models.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "io/safetensors.h"
#include "support/cpu_isas.h"
#include "system/program.h"

namespace octet::test {
namespace {

constexpr float kTolerance = 1e-4f;
// The reference rounded larger gradients to float16, half a unit in the 11th bit.
constexpr int64_t kRoundedAbove = 60000;
constexpr float kHalfUnit = 0x1p-11f;

std::vector<std::vector<int32_t>> rows_of(const io::SafetensorsFile& file, const char* name) {
  const tensor::TensorView view = file.view(name);
  std::vector<std::vector<int32_t>> rows;
  for (int64_t r = 0; r < view.rows(); ++r) {
    const int32_t* row = view.row<int32_t>(r);
    rows.emplace_back(row, row + view.row_elements());
  }
  return rows;
}

void expect_near(const std::vector<float>& got, const float* expected, size_t count,
                 const std::string& what) {
  ASSERT_EQ(got.size(), count) << what;
  for (size_t i = 0; i < count; ++i)
    ASSERT_NEAR(got[i], expected[i], kTolerance) << what << " " << i;
}

// One golden.safetensors against `score --gradients`.
void check_scores(const std::vector<std::string>& model, const std::string& golden) {
  const io::SafetensorsFile reference(golden);
  const auto inputs = rows_of(reference, "input_ids");
  std::string lines;
  for (const auto& row : inputs) lines += ids_line(row);
  const TemporaryFolder folder;
  const Arguments arguments = {"score", "--dtype", "float32",     "--input",
                               "-",     "--json",  "--gradients", folder.path("g.safetensors")};
  const Outcome outcome = octet(arguments + model, lines);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::vector<Json> answers = outcome.lines();
  ASSERT_EQ(answers.size(), inputs.size());

  double sum = 0;
  size_t count = 0;
  for (size_t r = 0; r < inputs.size(); ++r) {
    EXPECT_EQ(ids(answers[r]["ids"]), inputs[r]);
    EXPECT_TRUE(answers[r]["logprobs"][0].is_null());
    std::vector<float> log_probs = floats(answers[r]["logprobs"]);
    log_probs.erase(log_probs.begin());
    for (const float value : log_probs) sum += value;
    count += log_probs.size();
    if (!reference.has("token_logprobs")) continue;
    expect_near(log_probs, reference.view("token_logprobs").row<float>(static_cast<int64_t>(r)),
                inputs[r].size() - 1, "log-probability");
    expect_near(floats(answers[r]["entropies"]),
                reference.view("entropy").row<float>(static_cast<int64_t>(r)), inputs[r].size(),
                "entropy");
  }
  EXPECT_NEAR(-sum / static_cast<double>(count), reference.view("loss").as<float>()[0], kTolerance);

  const io::SafetensorsFile gradients(folder.path("g.safetensors"));
  size_t num_references = 0;
  for (const std::string& name : reference.names()) {
    if (!name.starts_with("grad.")) continue;
    ++num_references;
    const tensor::TensorView expected = reference.view(name);
    ASSERT_TRUE(gradients.has(name.substr(5))) << name;
    const tensor::TensorView got = gradients.view(name.substr(5));
    ASSERT_EQ(got.dtype, tensor::DType::kF32) << name;
    ASSERT_EQ(got.shape, expected.shape) << name;
    const float relative = expected.num_elements() > kRoundedAbove ? kHalfUnit : 0.0f;
    for (int64_t i = 0; i < expected.num_elements(); ++i) {
      const float value = expected.as<float>()[i];
      ASSERT_NEAR(got.as<float>()[i], value, kTolerance + relative * std::abs(value))
          << name << " " << i;
    }
  }
  EXPECT_EQ(gradients.names().size(), num_references);
}

void check_greedy(const std::string& model, const std::string& golden) {
  const io::SafetensorsFile reference(golden);
  const auto inputs = rows_of(reference, "input_ids");
  const auto expected = rows_of(reference, "greedy_after_16");
  std::string lines;
  for (auto row : inputs) {
    row.resize(16);
    lines += ids_line(row);
  }
  const Outcome outcome = octet(
      {"generate", "--model", model, "--dtype", "float32", "--temperature", "0", "--ignore-eos",
       "--max-new-tokens", std::to_string(expected[0].size()), "--input", "-", "--json"},
      lines);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (size_t r = 0; r < expected.size(); ++r) {
    EXPECT_EQ(ids(outcome.line(r)["ids"]), expected[r]);
    EXPECT_EQ(outcome.line(r)["finish_reason"], "length");
  }
}

TEST(Golden, Llama3) {
  const std::string model = kGolden + "models/llama3-tiny";
  check_scores({"--model", model}, model + "/golden.safetensors");
  check_greedy(model, model + "/golden.safetensors");
}

TEST(Golden, Qwen3) {
  const std::string model = kGolden + "models/qwen3-tiny";
  check_scores({"--model", model}, model + "/golden.safetensors");
  check_greedy(model, model + "/golden.safetensors");
}

TEST(Golden, Qwen3OnOtherInstructionSets) {
  const std::string model = kGolden + "models/qwen3-tiny";
  for (const cpu::Isa isa : cpu_isas()) {
    const std::string name(cpu::isa_name(isa));
    SCOPED_TRACE(name);
    check_scores({"--model", model, "--cpu-isa", name}, model + "/golden.safetensors");
  }
}

TEST(Golden, PeftAdapter) {
  check_scores({"--model", kGolden + "peft/base", "--adapter", kGolden + "peft/adapter"},
               kGolden + "peft/golden.safetensors");
}

}  // namespace
}  // namespace octet::test
