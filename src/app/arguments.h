// What each command is told, as plain data: the command line fills these and nothing else reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet::app {

struct DeviceArguments {
  std::string device = "auto";    // "auto" | "cpu" | "cuda" | "cuda:N"
  int threads = 0;                // 0: the processors this process may use
  std::string cpu_isa = "auto";   // "auto" | "portable" | "avx2" | "avx512"
  int64_t memory_limit = 0;       // bytes; 0: what the machine has
  bool inexact_products = false;  // any algorithm of cuBLASLt: to measure what exactness costs
};

struct ModelArguments {
  std::string model;        // a Hugging Face folder
  std::string shape;        // or a known model's shape, with random weights
  std::string adapter;      // a PEFT folder; empty: none
  std::string flow;         // empty: bf16, or the checkpoint's own
  std::string load_in_fp8;  // empty: block, or the checkpoint's own
  std::string kv_cache_dtype = "bf16";
  std::string dtype = "bf16";  // "float32": the oracle
  int64_t max_seq_length = 0;  // 0: what the inputs need
  int64_t batch_size = 0;      // sequences at once; 0: as many as serve well and fit
  DeviceArguments device;
};

// Texts given as arguments, or JSON Lines from a file or "-", or prompts of random ids.
struct InputArguments {
  std::vector<std::string> texts;
  std::string input;
  int64_t num_prompts = 1;
  int64_t prompt_tokens = 0;  // 0: none are random
  bool json = false;
};

struct ScoreArguments {
  ModelArguments model;
  InputArguments input;
  double temperature = 1.0;
  uint64_t seed = 0;  // taken as `generate` takes it; scoring draws nothing
  bool no_special_tokens = false;
  std::string gradients;  // a file to write; empty: none
  int64_t num_top = 0;    // likeliest ids of each distribution to show
};

struct GenerateArguments {
  ModelArguments model;
  InputArguments input;
  double temperature = 1.0;
  uint64_t seed = 0;
  bool no_special_tokens = false;
  int64_t max_new_tokens = 256;
  int64_t num_samples = 1;
  double top_p = 1.0;
  double min_p = 0.0;
  int32_t top_k = 0;
  std::vector<std::string> stop;
  bool ignore_eos = false;
};

struct TokenizeArguments {
  std::string tokenizer;  // a folder or a tokenizer.json
  InputArguments input;
  std::string chat_template;  // a file; empty: the tokenizer's own
  bool add_special_tokens = false;
  bool no_parse_special = false;
  bool skip_special_tokens = false;
};

struct ImportArguments {
  std::string source;
  std::string destination;
  std::string dtype;  // "bf16" | "f32"; empty: as stored, quantised tensors as F32
};

struct DoctorArguments {
  std::string config;  // empty: the machine alone
  std::vector<std::string> overrides;
  DeviceArguments device;
};

struct BenchArguments {
  std::string what;  // "limits" | "gemm" | "attention" | "rollout" | "exactness" | "load"
  bool json = false;
  // rollout, exactness; the defaults of a GPU, of which the command line makes smaller ones on a
  // CPU
  std::string shape = "qwen3-8b";
  int64_t num_layers = 0;  // 0: the shape's
  std::string flow = "fp8_lora";
  std::string scales = "block";
  std::string kv_cache_dtype = "fp8";
  int64_t lora_rank = 0;  // 0: no adapter
  int64_t num_prompts = 64;
  int64_t num_samples = 1;
  int64_t prompt_tokens = 1000;
  int64_t new_tokens = 1000;
  int64_t batch_tokens = 8192;  // of one step; gemm on CUDA: of a product
  int64_t max_sequences = 0;    // running at once; 0: all
  int64_t kv_tokens = 0;        // the pool; 0: enough for all
  int64_t repeat = 1;           // calls
  bool remap = false;           // another call, after the pool was unmapped and mapped again
  std::string folder;           // load: where the checkpoint is, or is made
  DeviceArguments device;
};

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;  // "section.key=value"
  bool resume = false;
};

}  // namespace octet::app
