#include "loop/run_identity.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/error.h"
#include "loop/config_keys.h"

namespace octet::loop {
namespace {

constexpr std::array<std::string_view, 13> kFreeKeys = {"train.max_steps",
                                                        "train.num_train_epochs",
                                                        "train.save_steps",
                                                        "train.save_total_limit",
                                                        "train.eval_steps",
                                                        "train.logging_steps",
                                                        "train.log_completions_steps",
                                                        "run.dir",
                                                        "run.report_to",
                                                        "run.device",
                                                        "run.threads",
                                                        "run.device_memory_limit",
                                                        "rollout.max_num_seqs"};

std::string library_version(int major, int minor, int patch) {
  return fmt::format("{}.{}.{}", major, minor, patch);
}

// Of a file's size and content; of one above 64 MiB the first 64 KiB of each 4 MiB, where other
// weights differ too.
std::string file_checksum(const std::string& path) {
  constexpr std::streamoff kPiece = 64 << 10;
  std::ifstream file(path, std::ios::binary);
  const auto num_bytes = static_cast<std::streamoff>(std::filesystem::file_size(path));
  uint32_t crc = crc32c(std::to_string(num_bytes));
  const std::streamoff stride = num_bytes <= (64 << 20) ? kPiece : 4 << 20;
  std::string piece(kPiece, '\0');
  for (std::streamoff at = 0; at < num_bytes; at += stride) {
    file.clear();
    file.seekg(at).read(piece.data(), kPiece);
    crc = crc32c({piece.data(), static_cast<size_t>(file.gcount())}, crc);
  }
  return fmt::format("crc32c:{:08x}", crc);
}

// The files that decide numbers, by path: those of the model's folder and the chat template.
Json file_checksums(const TrainConfig& config) {
  std::vector<std::string> paths;
  if (!config.data.chat_template.empty()) paths.push_back(config.data.chat_template);
  if (!config.model.path.empty()) {
    for (const auto& entry : std::filesystem::directory_iterator(config.model.path)) {
      const std::string kind = entry.path().extension().string();
      if (kind == ".json" || kind == ".jinja" || kind == ".safetensors") {
        paths.push_back(entry.path().string());
      }
    }
  }
  std::ranges::sort(paths);
  Json checksums = Json::object();
  for (const std::string& path : paths) checksums[path] = file_checksum(path);
  return checksums;
}

}  // namespace

Json make_provenance(const ops::Backend& backend, const TrainConfig& config,
                     const ModelSource& source, const DataSource& data, int64_t num_steps) {
  const model::Precision precision = make_precision(config, source.config);
  Json p = Json::object();
  p["octet_version"] = OCTET_VERSION;
  p["compiler"] = __VERSION__;
  p["libraries"] = {
      {"fmt", library_version(FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
      {"nlohmann_json", library_version(NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                        NLOHMANN_JSON_VERSION_PATCH)}};
  p["backend"] = backend.name();
  p["flow"] = config.precision.flow;
  if (precision.fp8()) {
    p["load_in_fp8"] = precision.scales == model::WeightScales::kTensor    ? "tensor"
                       : precision.scales == model::WeightScales::kChannel ? "channel"
                                                                           : "block";
  }
  p["kv_cache_dtype"] = config.model.kv_cache_dtype;
  p["model"] = {{"path", config.model.path},
                {"model_type", source.config.model_type},
                {"num_hidden_layers", source.config.num_hidden_layers},
                {"hidden_size", source.config.hidden_size},
                {"vocab_size", source.config.vocab_size}};
  p["lengths"] = {{"max_seq_length", config.model.max_seq_length},
                  {"max_prompt_length", config.data.max_prompt_length}};
  p["batch"] = {{"prompts_per_step", config.train.prompts_per_step},
                {"mini_batches", config.train.mini_batches},
                {"micro_batch_tokens", config.train.micro_batch_tokens}};
  if (config.is_rl()) {
    p["lengths"]["max_completion_length"] = config.rollout.max_completion_length;
    p["batch"]["num_generations"] = config.rollout.num_generations;
    p["batch"]["num_iterations"] = config.algorithm.num_iterations;
  }
  p["optim"] = {{"optim", config.optim.optim},
                {"learning_rate", config.optim.learning_rate},
                {"lr_scheduler_type", config.optim.lr_scheduler_type}};
  p["seeds"] = {{"run", config.run.seed}};
  if (config.model.init) p["seeds"]["model_init"] = config.model.init->seed;
  if (!config.data.task.empty()) p["seeds"]["task"] = config.data.task_seed;
  p["data"] = data.provenance();
  p["files"] = file_checksums(config);
  p["num_steps"] = num_steps;
  return p;
}

Json read_provenance(const std::string& path, std::string& problem) {
  try {
    Json provenance = read_json_file(path);
    if (!provenance.is_object()) fail(path, "a JSON object is required, but there is none");
    return provenance;
  } catch (const Error& error) {
    problem = error.what();
    return Json::object();
  }
}

void check_same_inputs(const Json& now, const Json& before) {
  const auto compare = [](const std::string& path, const Json& is, const Json& was) {
    if (is == was) return;
    fail(path,
         "a resumed run must read what it was started with, but the file has changed (its checksum "
         "was {} and is {}); bring it back, or start a new run in another run.dir",
         was.dump(), is.dump());
  };
  for (const char* part : {"/data/train", "/data/eval"}) {
    const Json::json_pointer pointer(part);
    const Json is = now.value(pointer, Json()), was = before.value(pointer, Json());
    if (is.is_object() && was.is_object()) compare(is["path"], is["checksum"], was["checksum"]);
  }
  Json files = before.value("files", Json());
  if (!files.is_object()) return;
  files.update(now["files"]);
  for (const auto& [path, checksum] : files.items()) {
    compare(path, now["files"].value(path, Json()), before["files"].value(path, Json()));
  }
}

void check_same_run(const TrainConfig& now, const std::string& config_path) {
  TrainConfig before = read_config(config_path);
  TrainConfig after = now;
  for (const Section& section : config_sections()) {
    if (has_section(before, section.name) == has_section(after, section.name)) continue;
    fail_usage(config_path,
               "a resumed run must keep its config, but [{}] was {}; restore it or "
               "start a new run in another run.dir",
               section.name, has_section(after, section.name) ? "added" : "removed");
  }
  for (const Key& key : config_keys()) {
    if (!has_section(after, section_of(key.name))) continue;
    if (std::ranges::find(kFreeKeys, key.name) != kFreeKeys.end()) continue;
    const std::string old_value = print_value(key, before);
    const std::string new_value = print_value(key, after);
    if (old_value == new_value) continue;
    fail_usage(config_path,
               "a resumed run must keep its config, but {} was {} and is {} now; restore it or "
               "start a new run in another run.dir",
               key.name, old_value, new_value);
  }
}

}  // namespace octet::loop
