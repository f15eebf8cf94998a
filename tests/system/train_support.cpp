#include "system/train_support.h"

#include <chrono>
#include <cmath>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <spawn.h>
#include <sstream>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>

#include <gtest/gtest.h>

#include "text/tokenizer.h"

extern char** environ;

namespace octet::test {
namespace {

namespace fs = std::filesystem;

std::string newest(const std::string& folder) {
  std::string last;
  for (const auto& entry : fs::directory_iterator(folder)) {
    last = std::max(last, entry.path().filename().string());
  }
  return folder + "/" + last;
}

std::map<std::string, std::string> files_below(const std::string& folder) {
  std::map<std::string, std::string> files;
  if (!fs::is_directory(folder)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    files[entry.path().lexically_relative(folder).string()] = read_text(entry.path().string());
  }
  return files;
}

void expect_equal_folders(const std::string& a, const std::string& b) {
  const auto ours = files_below(a);
  const auto theirs = files_below(b);
  for (const auto& [name, content] : ours) {
    const auto found = theirs.find(name);
    ASSERT_NE(found, theirs.end()) << b << " has no " << name;
    EXPECT_TRUE(content == found->second) << a << " and " << b << " differ in " << name;
  }
  EXPECT_EQ(ours.size(), theirs.size()) << a << " and " << b;
}

std::string metrics_but_times(const std::string& run) {
  std::string text;
  for (Json line : metrics_of(run)) {
    for (const char* name : {"step_time", "time/rollout", "time/reward", "time/train",
                             "rollout_tokens_per_second", "train_tokens_per_second"}) {
      line.erase(name);
    }
    text += line.dump() + "\n";
  }
  return text;
}

}  // namespace

std::string tiny_config_on(const std::string& model) {
  const size_t init = kTinyConfig.find("[model.init]");
  return kTinyConfig.substr(0, init) + "path = \"" + model + "\"\n" +
         kTinyConfig.substr(kTinyConfig.find("[data]"));
}

const std::string& tiny_model() {
  static const Trainer trainer;
  static const std::string path = trainer.trained("base", kSft) + "/model";
  return path;
}

Trainer::Trainer(const std::string& config) { write_text(this->config(), config); }

Arguments Trainer::command(const std::string& run, const Arguments& more) const {
  return Arguments{"train", config(), "run.dir=" + path(run)} + more;
}

Outcome Trainer::train(const std::string& run, const Arguments& more) const {
  return octet(command(run, more));
}

std::string Trainer::trained(const std::string& run, const Arguments& more) const {
  const Outcome outcome = train(run, more);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return path(run);
}

Outcome Trainer::doctor(const Arguments& more) const {
  return octet(Arguments{"doctor", config(), "run.dir=" + path("doctor")} + more);
}

Arguments Trainer::reward_script(const std::string& name, const std::string& text) const {
  write_text(path(name), text);
  return {"reward.functions=[]", "reward.command=exec /bin/sh " + path(name)};
}

std::vector<Json> read_lines(const std::string& path) {
  return Outcome{0, read_text(path), ""}.lines();
}

std::vector<Json> metrics_of(const std::string& run) { return read_lines(run + "/metrics.jsonl"); }

std::vector<double> values_of(const std::string& run, const std::string& metric) {
  std::vector<double> values;
  for (const Json& line : metrics_of(run)) {
    if (line.contains(metric)) {
      values.push_back(line[metric].is_null() ? std::nan("") : line[metric].get<double>());
    }
  }
  return values;
}

bool has_event(const std::string& run, const std::string& kind, const std::string& word) {
  for (const Json& event : read_lines(run + "/events.jsonl")) {
    if (event["kind"] == kind &&
        event["message"].get<std::string>().find(word) != std::string::npos) {
      return true;
    }
  }
  return false;
}

void expect_equal_runs(const std::string& a, const std::string& b) {
  EXPECT_EQ(metrics_but_times(a), metrics_but_times(b));
  expect_equal_folders(newest(a + "/checkpoints"), newest(b + "/checkpoints"));
  for (const char* folder : {"/completions", "/model", "/adapter"}) {
    expect_equal_folders(a + folder, b + folder);
  }
}

void expect_message(const Outcome& outcome, int exit_code, const std::vector<std::string>& words) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
  for (const std::string& word : words) {
    EXPECT_NE(outcome.err.find(word), std::string::npos)
        << "no \"" << word << "\" in: " << outcome.err;
  }
}

RunningProgram::RunningProgram(const Arguments& arguments) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  for (const auto& [number, name] : {std::pair(1, "out"), std::pair(2, "err")}) {
    posix_spawn_file_actions_addopen(&actions, number, folder_.path(name).c_str(),
                                     O_WRONLY | O_CREAT, 0600);
  }
  std::string program = OCTET_PROGRAM;
  std::vector<char*> argv{program.data()};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int error = posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + program);
}

RunningProgram::~RunningProgram() {
  if (pid_ < 0) return;
  signal(SIGKILL);
  wait();
}

bool RunningProgram::wait_until(const std::function<bool()>& condition) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < deadline) {
    if (condition()) return true;
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
    if (info.si_pid == pid_) return condition();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

Outcome RunningProgram::wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, read_text(folder_.path("out")), read_text(folder_.path("err"))};
}

TextModel::TextModel(const std::string& golden, const std::string& chat_template) {
  fs::create_directory(path());
  fs::copy_file(kGolden + golden + "/model.safetensors", path() + "/model.safetensors");
  std::string characters;
  for (char c = ' '; c <= '~'; ++c) characters += c;
  const std::vector<std::string> special = {"<|im_end|>", "<|end|>"};
  const int end = static_cast<int>(characters.size()) + 1;
  write_text(path() + "/tokenizer.json", text::make_character_tokenizer(characters, special));
  Json tokenizer = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", special[1]}};
  if (!chat_template.empty()) tokenizer["chat_template"] = chat_template;
  write_text(path() + "/tokenizer_config.json", tokenizer.dump());
  for (const char* name : {"/config.json", "/generation_config.json"}) {
    Json config = Json::parse(read_text(kGolden + golden + name));
    config["eos_token_id"] = end;
    write_text(path() + name, config.dump());
  }
}

}  // namespace octet::test
