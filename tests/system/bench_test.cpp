// What `octet bench` prints for programs.
#include <algorithm>

#include <gtest/gtest.h>

#include "system/program.h"

namespace octet::test {
namespace {

TEST(Bench, LimitsAreMeasured) {
  const Outcome outcome = octet({"bench", "limits", "--device", "cpu", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json limits = outcome.line(0);
  for (const char* key : {"copy_bandwidth", "bf16_flops", "fp8_flops"}) {
    EXPECT_GT(limits[key].get<double>(), 1e6) << key;
  }
}

// Each with a flag that some other bench, or the same on CUDA, uses.
TEST(Bench, AFlagThatIsNotUsedIsAnError) {
  const auto rejects = [](const Arguments& more) {
    const Outcome outcome = octet(Arguments{"bench", "--device", "cpu"} + more);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.out;
    EXPECT_NE(outcome.err.find("[" + more[1] + "] bench " + more[0] + " on the CPU"),
              std::string::npos)
        << outcome.err;
  };
  rejects({"gemm", "--shape", "smollm2-135m"});
  rejects({"gemm", "--layers", "1"});
  rejects({"gemm", "--batch-tokens", "8"});
  rejects({"limits", "--shape", "smollm2-135m"});
  rejects({"attention", "--layers", "1"});
  rejects({"exactness", "--json"});
  rejects({"rollout", "--inexact"});
  rejects({"rollout", "--folder", "/nowhere"});
  rejects({"load", "--lora-rank", "4", "--folder", "/nowhere"});
}

TEST(Bench, DefaultsOnACpuAreSmall) {
  const Outcome outcome = octet({"bench", "exactness", "--device", "cpu", "--layers", "1"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.out.find("-0.00 %"), std::string::npos) << outcome.out;
  for (const char* words : {"smollm2-135m, layers 1", "4 prompts x 1 samples, 64 + 64 tokens"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << outcome.out;
  }
}

// One layer of SmolLM2's shape, one prompt of 8 tokens and two new ones: the limit by hand.
TEST(Bench, ARolloutsLimitIsWhatItMustReadAndMultiply) {
  const Outcome outcome =
      octet({"bench", "rollout", "--device", "cpu", "--json", "--shape", "smollm2-135m", "--layers",
             "1", "--flow", "bf16", "--kv-cache-dtype", "bf16", "--prompts", "1", "--prompt-tokens",
             "8", "--new-tokens", "2"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json figures = outcome.line(0);
  const double bandwidth = figures["copy_bandwidth"], flops = figures["bf16_flops"];
  const double linears = 2.0 * 576 * (576 + 192 + 192 + 576 + 3 * 1536);  // bytes, FLOPs a token
  const double head = 2.0 * 49152 * 576;
  const double kv_bytes = 2.0 * 3 * 64 * 2;  // of a token
  const double pair_flops = 4.0 * 9 * 64;    // of a query and a key
  const auto step = [&](double tokens, double kv_tokens, double pairs) {
    return std::max(linears / bandwidth, tokens * linears / flops) +
           std::max(head / bandwidth, head / flops) +
           std::max(kv_tokens * kv_bytes / bandwidth, pairs * pair_flops / flops);
  };
  const double limit = step(8, 8 + 8, 8 * 9 / 2) + step(1, 9, 9);
  EXPECT_NEAR(figures["limit_seconds"].get<double>() / limit, 1, 1e-6);
  EXPECT_NEAR(figures["prefill_limit_seconds"].get<double>() +
                  figures["decode_limit_seconds"].get<double>(),
              figures["limit_seconds"].get<double>(), 1e-9);
  EXPECT_GT(figures["tokens_per_second"].get<double>(), 0);
}

// Three prompts' four whole shared pages and two more of each of 18 samples, 48 in all: the pool
// has these, all run at once, and with a page less they cannot.
TEST(Bench, APoolHoldsSharedPagesOnce) {
  const auto figures = [](const std::string& kv_tokens) {
    const Outcome outcome =
        octet({"bench", "rollout", "--device", "cpu", "--json", "--shape", "smollm2-135m",
               "--layers", "1", "--prompts", "3", "--n", "6", "--prompt-tokens", "70",
               "--new-tokens", "20", "--kv-tokens", kv_tokens});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.line(0);
  };
  const Json chosen = figures("0"), given = figures("768");
  EXPECT_EQ(chosen["steps"], 20);
  EXPECT_EQ(chosen["peak_bytes"], given["peak_bytes"]);
  EXPECT_GT(figures("752")["steps"].get<int64_t>(), 20);
}

}  // namespace
}  // namespace octet::test
