// Every log-probability that `octet generate` samples is the one that `octet score` computes, bit
// for bit, whatever the batch and the threads; and the FP8 flows stay near float32.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "io/safetensors.h"
#include "system/program.h"

namespace octet::test {
namespace {

struct Flow {
  const char* name;
  Arguments arguments;
};

const std::vector<Flow> kGranularities = {{"Tensor", {"--load-in-fp8", "tensor"}},
                                          {"Channel", {"--load-in-fp8", "channel"}},
                                          {"Block", {"--load-in-fp8", "block"}}};

Arguments full_model() { return {"--model", kGolden + "models/qwen3-tiny"}; }
Arguments lora_model() {
  return {"--model", kGolden + "peft/base", "--adapter", kGolden + "peft/adapter"};
}

// All flows that promise exactness, on the whole model and with an adapter.
std::vector<Flow> exact_flows() {
  std::vector<Flow> flows = {{"Bf16", full_model()}, {"Bf16Lora", lora_model()}};
  for (const Flow& granularity : kGranularities) {
    flows.push_back(
        {"Fp8Full", full_model() + Arguments{"--flow", "fp8_full"} + granularity.arguments});
    flows.push_back(
        {"Fp8Lora", lora_model() + Arguments{"--flow", "fp8_lora"} + granularity.arguments});
  }
  return flows;
}

// Lengths below, at and above a page of 16.
std::vector<std::vector<int32_t>> prompts() {
  std::vector<std::vector<int32_t>> result;
  for (const int length : {1, 15, 16, 17, 33}) {
    std::vector<int32_t>& prompt = result.emplace_back();
    for (int i = 0; i < length; ++i) prompt.push_back((37 * i + 11 * length) % 250);
  }
  return result;
}

Arguments batch(int batch_size, int threads) {
  return {"--input",
          "-",
          "--json",
          "--batch-size",
          std::to_string(batch_size),
          "--threads",
          std::to_string(threads)};
}

void expect_equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i]))
        << "token " << i << ": " << a[i] << " and " << b[i];
  }
}

void check_flow(const Arguments& model, const std::string& temperature) {
  const auto inputs = prompts();
  std::string lines;
  for (const auto& prompt : inputs) lines += ids_line(prompt);
  const Arguments sampling =
      model + Arguments{"--temperature",    temperature, "--seed",      "7", "--n", "2",
                        "--max-new-tokens", "18",        "--ignore-eos"};
  const Outcome first = octet(Arguments{"generate"} + sampling + batch(16, 2), lines);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  for (const auto& [size, threads] : {std::pair(1, 1), {3, 2}, {16, 1}}) {
    const Outcome other = octet(Arguments{"generate"} + sampling + batch(size, threads), lines);
    ASSERT_EQ(other.out, first.out) << "batch size " << size << ", threads " << threads;
  }

  std::string sequences;
  std::vector<std::vector<float>> sampled;
  std::vector<size_t> starts;
  for (size_t p = 0; p < inputs.size(); ++p) {
    const Json answer = first.line(p);
    for (const Json& completion : answer["completions"]) {
      std::vector<int32_t> sequence = inputs[p];
      for (const int32_t id : ids(completion["ids"])) sequence.push_back(id);
      sequences += ids_line(sequence);
      sampled.push_back(floats(completion["logprobs"]));
      starts.push_back(inputs[p].size());
    }
  }
  ASSERT_EQ(sampled.size(), 2 * inputs.size());
  const Arguments scoring = model + Arguments{"--temperature", temperature};
  const Outcome scores = octet(Arguments{"score"} + scoring + batch(16, 2), sequences);
  ASSERT_EQ(scores.exit_code, 0) << scores.err;
  for (size_t s = 0; s < sampled.size(); ++s) {
    std::vector<float> log_probs = floats(scores.line(s)["logprobs"]);
    log_probs.erase(log_probs.begin(), log_probs.begin() + static_cast<std::ptrdiff_t>(starts[s]));
    expect_equal_bits(sampled[s], log_probs);
  }
  for (const auto& [size, threads] : {std::pair(1, 1), {3, 1}}) {
    const Outcome other = octet(Arguments{"score"} + scoring + batch(size, threads), sequences);
    ASSERT_EQ(other.out, scores.out) << "batch size " << size << ", threads " << threads;
  }
}

class Exactness : public testing::TestWithParam<Flow> {};

TEST_P(Exactness, SampledEqualsScoredWithBf16Cache) { check_flow(GetParam().arguments, "0.8"); }

TEST_P(Exactness, SampledEqualsScoredWithFp8Cache) {
  check_flow(GetParam().arguments + Arguments{"--kv-cache-dtype", "fp8"}, "1");
}

INSTANTIATE_TEST_SUITE_P(Flows, Exactness, testing::ValuesIn(exact_flows()), [](const auto& info) {
  const auto& arguments = info.param.arguments;
  const bool fp8 = arguments[arguments.size() - 2] == "--load-in-fp8";
  return info.param.name + (fp8 ? "_" + arguments.back() : "");
});

TEST(Exactness, GreedyGivesTheLogProbabilitiesOfTemperatureOne) {
  const std::vector<int32_t> prompt = prompts()[3];
  const Outcome greedy = octet(Arguments{"generate"} + full_model() +
                                   Arguments{"--temperature", "0", "--max-new-tokens", "12",
                                             "--ignore-eos", "--input", "-", "--json"},
                               ids_line(prompt));
  ASSERT_EQ(greedy.exit_code, 0) << greedy.err;
  std::vector<int32_t> sequence = prompt;
  for (const int32_t id : ids(greedy.line(0)["ids"])) sequence.push_back(id);
  for (const char* temperature : {"0", "1"}) {
    const Outcome scores =
        octet(Arguments{"score"} + full_model() +
                  Arguments{"--temperature", temperature, "--input", "-", "--json"},
              ids_line(sequence));
    std::vector<float> log_probs = floats(scores.line(0)["logprobs"]);
    log_probs.erase(log_probs.begin(),
                    log_probs.begin() + static_cast<std::ptrdiff_t>(prompt.size()));
    expect_equal_bits(floats(greedy.line(0)["logprobs"]), log_probs);
  }
}

// Root mean square over the reference's tokens of what a flow changes in the log-probabilities.
double rms_error(const Arguments& flow, const io::SafetensorsFile& reference) {
  const tensor::TensorView inputs = reference.view("input_ids");
  const tensor::TensorView expected = reference.view("token_logprobs");
  std::string lines;
  for (int64_t r = 0; r < inputs.rows(); ++r) {
    const int32_t* row = inputs.row<int32_t>(r);
    lines += ids_line({row, row + inputs.row_elements()});
  }
  const Outcome outcome =
      octet(Arguments{"score"} + flow + Arguments{"--input", "-", "--json"}, lines);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  double sum = 0;
  for (int64_t r = 0; r < inputs.rows(); ++r) {
    const std::vector<float> got = floats(outcome.line(static_cast<size_t>(r))["logprobs"]);
    for (int64_t t = 0; t < expected.row_elements(); ++t) {
      const double difference = got[static_cast<size_t>(t) + 1] - expected.row<float>(r)[t];
      sum += difference * difference;
    }
  }
  return std::sqrt(sum / static_cast<double>(expected.num_elements()));
}

// The BF16 flow rounds every product's activations, and keys and values, to 7 fraction bits; its
// weights are exact (the checkpoint is BF16). The FP8 flows round at the same places to E4M3's 3
// bits, 2^4 times as coarsely, and the weights too: two roundings for each one. Independent errors
// add up in squares, hence √2 · 2^4 times the error of BF16, and BF16's own for all that stays in
// BF16:  rms(FP8) ≤ √(2 · 16² + 1) · rms(BF16).
const double kCoarser = std::sqrt(2.0 * 16 * 16 + 1);

TEST(Exactness, Fp8StaysNearFloat32) {
  const std::string model = kGolden + "models/llama3-tiny";
  const io::SafetensorsFile reference(model + "/golden.safetensors");
  const double bf16 = rms_error({"--model", model}, reference);
  // Twelve products in a row, each off by 2^-8 of logits of about 1.2 if all errors pointed one
  // way.
  EXPECT_LE(bf16, 12 * 0x1p-8 * 1.2);
  for (const char* flow : {"fp8_lora", "fp8_full"}) {
    for (const Flow& granularity : kGranularities) {
      SCOPED_TRACE(std::string(flow) + " " + granularity.name);
      const double error =
          rms_error(Arguments{"--model", model, "--flow", flow, "--kv-cache-dtype", "fp8"} +
                        granularity.arguments,
                    reference);
      EXPECT_LE(error, kCoarser * bf16);
      EXPECT_GE(error, 2 * bf16);  // FP8 was really used
    }
  }
}

// All elements of all gradients in the order of their names.
std::vector<float> gradient(const Arguments& flow) {
  const TemporaryFolder folder;
  const std::string path = folder.path("gradients.safetensors");
  std::string lines;
  for (const auto& prompt : prompts()) lines += ids_line(prompt);
  const Outcome outcome = octet(
      Arguments{"score"} + flow + Arguments{"--input", "-", "--json", "--gradients", path}, lines);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const io::SafetensorsFile file(path);
  Arguments names = file.names();
  std::ranges::sort(names);
  std::vector<float> values;
  for (const std::string& name : names) {
    const tensor::TensorView view = file.view(name);
    values.insert(values.end(), view.as<float>(), view.as<float>() + view.num_elements());
  }
  return values;
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    ab += static_cast<double>(a[i]) * b[i];
    aa += static_cast<double>(a[i]) * a[i];
    bb += static_cast<double>(b[i]) * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

// Independent errors of a share e of the gradient turn it by an angle of e: cos = 1 / √(1 + e²).
// Forward and backward each bring about 0.2 in FP8 (the bound above, over logits of about 1.2), and
// 16 times less in BF16.
TEST(Exactness, GradientsOfAllFlowsPointTheSameWay) {
  const Arguments oracle = {"--dtype", "float32"};
  for (const auto& [model, flow] :
       {std::pair(full_model(), "fp8_full"), {lora_model(), "fp8_lora"}}) {
    const std::vector<float> expected = gradient(model + oracle);
    EXPECT_GE(cosine(gradient(model), expected), 0.999);
    for (const Flow& granularity : kGranularities) {
      SCOPED_TRACE(std::string(flow) + " " + granularity.name);
      const double near =
          cosine(gradient(model + Arguments{"--flow", flow, "--kv-cache-dtype", "fp8"} +
                          granularity.arguments),
                 expected);
      EXPECT_GE(near, 1 / std::sqrt(1 + 2 * 0.2 * 0.2));
      EXPECT_LE(near, 0.9999);
    }
  }
}

}  // namespace
}  // namespace octet::test
