#include "app/command_line.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "app/backend_choice.h"
#include "app/commands.h"
#include "app/output.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::app {
namespace {

using Run = std::function<int()>;

void add_device_options(CLI::App& command, DeviceArguments& device) {
  command.add_option("--device", device.device, "auto | cpu | cuda | cuda:N")
      ->capture_default_str();
  command.add_option("--threads", device.threads, "threads of the CPU; 0: all it may use")
      ->capture_default_str();
  command.add_option("--cpu-isa", device.cpu_isa, "auto | portable | avx2 | avx512")
      ->capture_default_str();
  command.add_option_function<std::string>(
      "--device-memory-limit",
      [&device](const std::string& text) {
        device.memory_limit = parse_bytes(text, "--device-memory-limit");
      },
      "memory to use at most, such as 5GiB; default: what is free on a GPU, what the machine has "
      "on a CPU");
}

void add_model_options(CLI::App& command, ModelArguments& model) {
  command.add_option("--model", model.model, "a Hugging Face model folder");
  command.add_option(
      "--shape", model.shape,
      "instead: random weights of a known model's shape, such as qwen3-8b; ids only");
  command.add_option("--adapter", model.adapter, "a LoRA adapter's folder, as PEFT writes it");
  command.add_option("--flow", model.flow,
                     "bf16 | fp8_lora | fp8_full; default: bf16, or the checkpoint's own");
  command.add_option("--load-in-fp8", model.load_in_fp8,
                     "tensor | channel | block; default: block, or the checkpoint's own");
  command.add_option("--kv-cache-dtype", model.kv_cache_dtype, "bf16 | fp8")->capture_default_str();
  command.add_option("--dtype", model.dtype, "bf16 | float32 (the oracle: nothing is rounded)")
      ->capture_default_str();
  command.add_option("--max-seq-length", model.max_seq_length,
                     "positions of one sequence; default: what the inputs need");
  command.add_option("--batch-size", model.batch_size,
                     "sequences at once; default: up to 256 on a GPU, 16 on a CPU, fewer where "
                     "memory is short; changes no result");
  add_device_options(command, model.device);
}

void add_input_options(CLI::App& command, InputArguments& input) {
  command.add_option("text", input.texts, "texts, instead of --input");
  command.add_option("--input", input.input, "a file of JSON Lines, or - for standard input");
  command.add_flag("--json", input.json, "write one JSON line per input line");
}

void add_random_prompts(CLI::App& command, InputArguments& input) {
  command.add_option("--prompt-tokens", input.prompt_tokens,
                     "instead of an input: prompts of this many random ids");
  command.add_option("--prompts", input.num_prompts, "how many of them")->capture_default_str();
}

void add_seed(CLI::App& command, uint64_t& seed, const char* text) {
  command
      .add_option_function<std::string>(
          "--seed",
          [&seed](const std::string& given) {
            const char* const end = given.data() + given.size();
            const auto [last, error] = std::from_chars(given.data(), end, seed);
            if (error == std::errc() && last == end) return;
            fail_usage("--seed", "must be 0 to {}, but is \"{}\"",
                       std::numeric_limits<uint64_t>::max(), given);
          },
          text)
      ->default_str("0");
}

Run define_score(CLI::App& command) {
  auto arguments = std::make_shared<ScoreArguments>();
  add_model_options(command, arguments->model);
  add_input_options(command, arguments->input);
  add_random_prompts(command, arguments->input);
  command
      .add_option("--top", arguments->num_top,
                  "also show this many of the likeliest ids with their logits")
      ->capture_default_str();
  command.add_option("--temperature", arguments->temperature, "0 counts as 1")
      ->capture_default_str();
  add_seed(command, arguments->seed, "taken as by generate; scoring draws nothing");
  command.add_flag("--no-special-tokens", arguments->no_special_tokens,
                   "leave out what the tokenizer puts around a text");
  command.add_option("--gradients", arguments->gradients,
                     "also write the gradient of the mean negative log-probability to this "
                     "safetensors file");
  command.footer(
      "A line is {\"ids\":[...]}, {\"text\":\"...\"} or {\"messages\":[...]}; the answer is\n"
      "{\"ids\":[...],\"logprobs\":[null,...],\"entropies\":[...]} in nats: logprobs[t] is of "
      "ids[t] given\nthose before it, entropies[t] of the distribution after ids[t]. With --top, "
      "top[t] is a list of [id, logit]\nof that distribution, the likeliest first.\n\n"
      "Example:\n  octet score --model models/Qwen3-0.6B --json \"The capital of France is "
      "Paris.\"");
  return [arguments] { return run_score(*arguments); };
}

Run define_generate(CLI::App& command) {
  auto arguments = std::make_shared<GenerateArguments>();
  add_model_options(command, arguments->model);
  add_input_options(command, arguments->input);
  add_random_prompts(command, arguments->input);
  command.add_option("--max-new-tokens", arguments->max_new_tokens, "tokens to add at most")
      ->capture_default_str();
  command
      .add_option("--n", arguments->num_samples,
                  "samples of each prompt; above 1 a line's answer is {\"completions\":[...]}")
      ->capture_default_str();
  command
      .add_option("--temperature", arguments->temperature,
                  "0: greedy, with log-probabilities at temperature 1")
      ->capture_default_str();
  command.add_option("--top-p", arguments->top_p, "keep the most likely tokens up to this mass")
      ->capture_default_str();
  command.add_option("--top-k", arguments->top_k, "keep this many tokens; 0: all")
      ->capture_default_str();
  command.add_option("--min-p", arguments->min_p, "keep tokens of this share of the likeliest")
      ->capture_default_str();
  add_seed(command, arguments->seed, "decides every random number");
  command.add_option("--stop", arguments->stop, "a text that ends a completion; may be repeated")
      ->expected(1)
      ->allow_extra_args(false)  // the next word is a text
      ->take_all();
  command.add_flag("--ignore-eos", arguments->ignore_eos, "end tokens do not stop");
  command.add_flag("--no-special-tokens", arguments->no_special_tokens,
                   "leave out what the tokenizer puts around a text");
  command.footer(
      "A line is {\"ids\":[...]}, {\"text\":\"...\"} or {\"messages\":[...]}; the answer is\n"
      "{\"ids\":[...],\"text\":\"...\",\"logprobs\":[...],\"finish_reason\":\"stop|length\"}.\n\n"
      "Example:\n  octet generate --model models/Qwen3-0.6B --max-new-tokens 64 --temperature 0 "
      "\"Once upon a time\"");
  return [arguments] { return run_generate(*arguments); };
}

Run define_tokenize(CLI::App& command) {
  auto arguments = std::make_shared<TokenizeArguments>();
  command.add_option("--tokenizer", arguments->tokenizer, "a model folder or a tokenizer.json")
      ->required();
  add_input_options(command, arguments->input);
  command.add_option("--chat-template", arguments->chat_template,
                     "a Jinja file; default: the tokenizer's own");
  command.add_flag("--add-special-tokens", arguments->add_special_tokens,
                   "put around a text what the tokenizer's post-processor says");
  command.add_flag("--no-parse-special", arguments->no_parse_special,
                   "take special tokens within a text as plain text");
  command.add_flag("--skip-special-tokens", arguments->skip_special_tokens,
                   "leave special tokens out of decoded text");
  command.footer(
      "A line is {\"text\":\"...\"}, {\"ids\":[...]} or "
      "{\"messages\":[...],\"tools\":[...],\"kwargs\":{...}}.\n\n"
      "Example:\n  echo '{\"text\":\"Hello\"}' | octet tokenize --tokenizer models/Qwen3-0.6B "
      "--input - --json");
  return [arguments] { return run_tokenize(*arguments); };
}

Run define_import(CLI::App& command) {
  auto arguments = std::make_shared<ImportArguments>();
  command.add_option("source", arguments->source, "a GGUF file")->required();
  command.add_option("destination", arguments->destination, "the folder to make")->required();
  command.add_option("--dtype", arguments->dtype,
                     "bf16 | f32; default: as stored, quantised tensors as F32");
  command.footer("Example:\n  octet import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2");
  return [arguments] { return run_import(*arguments); };
}

Run define_doctor(CLI::App& command) {
  auto arguments = std::make_shared<DoctorArguments>();
  command.add_option("config", arguments->config, "a training config to check");
  command.add_option("overrides", arguments->overrides, "section.key=value");
  add_device_options(command, arguments->device);
  command.footer("Example:\n  octet doctor recipes/demo-grpo.toml model.max_seq_length=1024");
  return [arguments] { return run_doctor(*arguments); };
}

using Flags = std::vector<std::string>;

// The flags that a bench uses there, besides those of the device; none where there is no such
// bench.
Flags bench_flags(const std::string& what, bool cuda) {
  Flags flags;
  const auto add = [&](const Flags& more) { flags.insert(flags.end(), more.begin(), more.end()); };
  if (what == "limits" || what == "attention" || what == "rollout" || (what == "gemm" && !cuda)) {
    add({"--json"});
  }
  if (what == "attention" || (what == "gemm" && cuda)) add({"--shape"});
  if (what == "gemm" && cuda) add({"--batch-tokens"});
  if (what == "load") add({"--folder"});
  if (what == "rollout" || what == "exactness" || what == "load") {
    add({"--shape", "--layers", "--flow", "--load-in-fp8"});
  }
  if (what == "rollout" || what == "exactness") {
    add({"--kv-cache-dtype", "--lora-rank", "--prompts", "--n", "--prompt-tokens", "--new-tokens",
         "--batch-tokens", "--max-num-seqs", "--kv-tokens", "--repeat", "--remap"});
  }
  if (cuda && !flags.empty()) add({"--inexact"});
  return flags;
}

// A flag that was given and that the bench would ignore is an error.
void check_bench_flags(const std::vector<CLI::Option*>& options, const std::string& what,
                       bool cuda) {
  const Flags used = bench_flags(what, cuda);
  if (used.empty()) return;  // run_bench names those that there are
  for (const CLI::Option* option : options) {
    const std::string flag = option->get_name();
    if (option->count() == 0 || std::ranges::find(used, flag) != used.end()) continue;
    fail_usage(flag, "bench {} on {} does not use it; leave it out, or choose of {}", what,
               cuda ? "CUDA" : "the CPU", fmt::join(used, ", "));
  }
}

// Where no others are given: of these a rollout takes a CPU seconds.
constexpr const char* kCpuShape = "smollm2-135m";
constexpr int64_t kCpuPrompts = 4, kCpuTokens = 64;

Run define_bench(CLI::App& command) {
  auto arguments = std::make_shared<BenchArguments>();
  arguments->device.threads = 1;
  command
      .add_option("what", arguments->what, "limits | gemm | attention | rollout | exactness | load")
      ->required();
  const size_t num_common = command.get_options().size();
  const auto number = [&](const char* flag, int64_t& to, const std::string& text) {
    command.add_option(flag, to, text)->capture_default_str();
  };
  const auto on_cpu = [](auto value) { return fmt::format("; on a CPU by default {}", value); };
  command.add_option("--shape", arguments->shape, "a known model's" + on_cpu(kCpuShape))
      ->capture_default_str();
  command.add_option("--flow", arguments->flow, "bf16 | fp8_lora | fp8_full")
      ->capture_default_str();
  command.add_option("--load-in-fp8", arguments->scales, "tensor | channel | block")
      ->capture_default_str();
  command.add_option("--kv-cache-dtype", arguments->kv_cache_dtype, "bf16 | fp8")
      ->capture_default_str();
  number("--layers", arguments->num_layers, "0: as the shape has");
  number("--lora-rank", arguments->lora_rank, "0: no adapter");
  number("--prompts", arguments->num_prompts, "prompts" + on_cpu(kCpuPrompts));
  number("--n", arguments->num_samples, "samples of each prompt");
  number("--prompt-tokens", arguments->prompt_tokens, "tokens of a prompt" + on_cpu(kCpuTokens));
  number("--new-tokens", arguments->new_tokens, "tokens of a sample" + on_cpu(kCpuTokens));
  number("--batch-tokens", arguments->batch_tokens,
         "new tokens of one step, or of a product of gemm, at most");
  number("--max-num-seqs", arguments->max_sequences, "running at once; 0: all");
  number("--kv-tokens", arguments->kv_tokens, "tokens that the pool holds; 0: enough for all");
  number("--repeat", arguments->repeat, "calls of rollout; memory must not grow");
  command.add_flag("--remap", arguments->remap,
                   "unmap the pool, map it again, and compare the next call with the one before");
  command.add_option("--folder", arguments->folder,
                     "load: where the checkpoint is; made there if it is not");
  command.add_flag("--json", arguments->json, "write JSON instead of a table");
  command.add_flag("--inexact", arguments->device.inexact_products,
                   "on CUDA any matrix product, whatever its rows: what exactness costs");
  std::vector<CLI::Option*> options = command.get_options();
  options.erase(options.begin(), options.begin() + static_cast<ptrdiff_t>(num_common));
  add_device_options(command, arguments->device);
  command.footer(
      "A flag that a bench does not use on the device is an error that names those it uses.\n\n"
      "Example:\n  octet bench gemm --threads 1\n"
      "  octet bench gemm --device cuda:0 --shape qwen3-8b --batch-tokens 64\n"
      "  octet bench rollout --shape qwen3-8b --prompts 256\n"
      "  octet bench exactness --shape qwen3-8b --layers 4 --new-tokens 256\n"
      "  octet bench load --shape qwen3-8b --folder /dev/shm/qwen3-8b");
  return [arguments, options, &command] {
    const bool cuda = uses_cuda(arguments->device);
    check_bench_flags(options, arguments->what, cuda);
    if (!cuda) {
      const auto default_to = [&](const char* flag, auto value, auto& to) {
        if (command.count(flag) == 0) to = value;
      };
      default_to("--shape", kCpuShape, arguments->shape);
      default_to("--prompts", kCpuPrompts, arguments->num_prompts);
      default_to("--prompt-tokens", kCpuTokens, arguments->prompt_tokens);
      default_to("--new-tokens", kCpuTokens, arguments->new_tokens);
    }
    return run_bench(*arguments);
  };
}

Run define_train(CLI::App& command) {
  auto arguments = std::make_shared<TrainArguments>();
  command.add_option("config", arguments->config, "a TOML file; see docs/configuration.md")
      ->required();
  command.add_option("overrides", arguments->overrides, "section.key=value");
  command.add_flag("--resume", arguments->resume,
                   "continue run.dir from its newest whole checkpoint");
  command.footer("Example:\n  octet train recipes/demo-grpo.toml train.max_steps=50");
  return [arguments] { return run_train(*arguments); };
}

struct Command {
  const char* name;
  const char* summary;
  Run (*define)(CLI::App&);
};

constexpr Command kCommands[] = {
    {"train", "train a model: SFT or RL, as a config says", define_train},
    {"generate", "text from prompts, one or a file of them", define_generate},
    {"score", "log-probabilities and entropies of ids, text or conversations", define_score},
    {"tokenize", "text or conversations to ids and back", define_tokenize},
    {"import", "a GGUF file to a Hugging Face folder", define_import},
    {"doctor", "the machine and, with a config, its files and memory plan", define_doctor},
    {"bench", "measure: limits, gemm, attention, rollout, exactness, load", define_bench},
};

std::string suggestion(const std::string& name, const std::vector<std::string>& candidates) {
  const std::string nearest = nearest_name(name, candidates);
  return nearest.empty() ? "" : fmt::format("; did you mean \"{}\"?", nearest);
}

// CLI11 makes a list of an argument "[a,b]". A mark behind the bracket, taken off again where the
// value is read, keeps such a text whole.
constexpr char kMark = '\x1f';

std::vector<std::string> marked_in_reverse(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = argc - 1; i > 0; --i) {
    arguments.emplace_back(argv[i]);
    if (arguments.back().ends_with(']')) arguments.back() += kMark;
  }
  return arguments;
}

std::string without_mark(std::string value) {
  if (value.ends_with(kMark)) value.pop_back();
  return value;
}

// A first word that is no command, which CLI11 would only call "not expected".
void check_command(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  const std::string name = argv[1];
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.push_back(command.name);
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  const std::string hint = suggestion(name, names);
  fail_usage("octet", "there is no command \"{}\"{}", name,
             hint.empty() ? "; see octet --help" : hint);
}

// What was not expected, with the nearest flag of the command.
std::string describe_extras(const CLI::App& root) {
  const CLI::App* app = &root;
  if (!root.get_subcommands().empty()) app = root.get_subcommands()[0];
  std::vector<std::string> names;
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::vector<std::string> extras = root.remaining(true);
  if (extras.empty()) return "";
  const std::string flag = without_mark(extras[0].substr(0, extras[0].find('=')));
  return fmt::format("there is no \"{}\"{}", flag, suggestion(flag, names));
}

}  // namespace

int run_command_line(int argc, char** argv) {
  check_command(argc, argv);
  CLI::App root("Octet trains language models by reinforcement learning in FP8.", "octet");
  root.set_version_flag("--version", "octet " OCTET_VERSION);
  root.require_subcommand(1);
  root.footer("octet COMMAND --help explains a command.");
  Run run;
  for (const Command& command : kCommands) {
    CLI::App* sub = root.add_subcommand(command.name, command.summary);
    sub->callback([&run, chosen = command.define(*sub)] { run = chosen; });
    for (CLI::Option* option : sub->get_options()) {
      if (option->get_expected_max() > 0) option->transform(without_mark);
    }
  }
  try {
    root.parse(marked_in_reverse(argc, argv));
  } catch (const CLI::Success& success) {
    std::ostringstream text;  // --help, --version
    const int exit_code = root.exit(success, text);
    print(text.str());
    return exit_code;
  } catch (const CLI::ParseError& error) {
    const std::string reason = describe_extras(root);  // before what is missing: it may be the same
    const auto chosen = root.get_subcommands();
    const std::string where = "octet" + (chosen.empty() ? "" : " " + chosen[0]->get_name());
    fail_usage(where, "{}; see {} --help", reason.empty() ? error.what() : reason, where);
  }
  return run();
}

}  // namespace octet::app
