// A run that was stopped and continued is the run that never stopped, byte for byte.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "system/train_support.h"

namespace octet::test {
namespace {

namespace fs = std::filesystem;

int64_t num_lines(const std::string& path) {
  const std::string text = read_text(path);
  return std::count(text.begin(), text.end(), '\n');
}

// A reward for batches of 8 that sends its parent `signal` at its `call`-th batch, once.
std::string signalling_reward(const std::string& marker, int call, const std::string& signal) {
  return "n=0\nwhile read -r line; do\n n=$((n+1))\n"
         " if [ $n = " +
         std::to_string(call) + " ] && [ ! -e " + marker +
         " ]; then\n"
         "  touch " +
         marker + "; kill -" + signal +
         " $PPID; sleep 0.1\n fi\n"
         " echo '{\"rewards\":[0,1,0,0,1,0.5,0,1]}'\ndone\n";
}

// Batches of 8 in rollouts and evaluations; calls: 1 is the evaluation before the first step.
const Arguments kEights = {"train.prompts_per_step=2", "train.max_steps=6", "train.eval_steps=2",
                           "train.save_steps=2"};

// Runs whole, then with a signal at `call`, resumed; returns the folder that was resumed.
std::string stop_and_resume(const Trainer& trainer, const Arguments& flow, int call,
                            const std::string& signal, int exit_code, int64_t steps_left) {
  const std::string marker = trainer.path("marker");
  const Arguments arguments =
      flow + kEights + trainer.reward_script("reward.sh", signalling_reward(marker, call, signal));
  write_text(marker, "");
  const std::string whole = trainer.trained("whole", arguments);
  fs::remove(marker);
  const Outcome stopped = trainer.train("run", arguments);
  EXPECT_EQ(stopped.exit_code, exit_code) << stopped.err;
  const std::string run = trainer.path("run");
  EXPECT_FALSE(has_event(run, "done"));
  if (exit_code == 1) {
    // The message is the command that continues, with all that was given.
    EXPECT_NE(stopped.err.find("octet train " + trainer.config() + " run.dir="), std::string::npos)
        << stopped.err;
    EXPECT_NE(stopped.err.find("'reward.command=exec /bin/sh "), std::string::npos) << stopped.err;
    EXPECT_NE(stopped.err.find("--resume"), std::string::npos) << stopped.err;
    EXPECT_TRUE(has_event(run, "interrupted"));
  }
  const int64_t before = num_lines(run + "/events.jsonl");
  trainer.trained("run", arguments + Arguments{"--resume"});
  EXPECT_EQ(Json(read_lines(run + "/events.jsonl")[before])["step"], 6 - steps_left);
  expect_equal_runs(whole, run);
  return run;
}

TEST(TrainResume, AfterASignalInTheMiddleOfAStep) {
  // Call 5: the reward of step 3. The step is finished first.
  stop_and_resume(Trainer(), {}, 5, "INT", 1, 3);
}

TEST(TrainResume, CalibratedClippingGoesOn) {
  const std::string run = [] {
    const Trainer trainer;
    const std::string folder = stop_and_resume(trainer, kFp8Full, 5, "INT", 1, 3);
    const std::vector<double> low = values_of(folder, "calibration/low");
    EXPECT_NE(low.front(), low.back());
    return folder;
  }();
}

TEST(TrainResume, AfterASignalJustBeforeAnEvaluation) {
  // Call 3 is the reward of step 2, whose evaluation is left for the resumed run.
  const Trainer trainer;
  const std::string run = stop_and_resume(trainer, {}, 3, "INT", 1, 4);
  EXPECT_EQ(values_of(run, "eval/reward").size(), 4u);
  // So is that of the last step.
  const Trainer last;
  EXPECT_EQ(values_of(stop_and_resume(last, {}, 9, "INT", 1, 0), "eval/reward").size(), 4u);
}

TEST(TrainResume, AfterASignalBeforeTheFirstStep) {
  stop_and_resume(Trainer(), {}, 1, "INT", 1, 6);
}

TEST(TrainResume, AfterTheProcessWasKilled) {
  // Call 8 is in step 5; the checkpoint is of step 4.
  stop_and_resume(Trainer(tiny_config_on(tiny_model())), kFp8Lora, 8, "KILL", 137, 2);
}

TEST(TrainResume, KilledBeforeTheFirstCheckpointItStartsAgain) {
  stop_and_resume(Trainer(), {}, 2, "KILL", 137, 6);
}

TEST(TrainResume, SftAtAnyTime) {
  const Trainer trainer;
  const Arguments arguments = kSft + Arguments{"train.max_steps=200", "train.prompts_per_step=16",
                                               "train.save_total_limit=2", "train.save_steps=20",
                                               "optim.lr_scheduler_type=cosine"};
  const std::string whole = trainer.trained("whole", arguments);
  const std::string run = trainer.path("run");
  for (const int64_t steps : {5, 50}) {
    RunningProgram program(trainer.command("run", arguments) +
                           (steps == 5 ? Arguments{} : Arguments{"--resume"}));
    ASSERT_TRUE(program.wait_until([&] { return num_lines(run + "/metrics.jsonl") > steps; }));
    program.signal(SIGINT);
    const Outcome stopped = program.wait();
    ASSERT_EQ(stopped.exit_code, 1) << stopped.err;
    EXPECT_NE(stopped.err.find("stopped after step"), std::string::npos) << stopped.err;
  }
  trainer.trained("run", arguments + Arguments{"--resume"});
  expect_equal_runs(whole, run);
  EXPECT_EQ(num_lines(run + "/metrics.jsonl"), 201);
}

TEST(TrainResume, TheSecondSignalEndsTheProgram) {
  const Trainer trainer;
  const std::string marker = trainer.path("marker");
  RunningProgram program(trainer.command(
      "run", trainer.reward_script("slow.sh", "read -r line\ntouch " + marker + "\nsleep 5\n")));
  ASSERT_TRUE(program.wait_until([&] { return fs::exists(marker); }));
  program.signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // two at once are one
  program.signal(SIGINT);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(program.wait().exit_code, 130);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
}

TEST(TrainResume, ADamagedCheckpointIsPassedOver) {
  const Trainer trainer;
  const Arguments arguments = kFp8Full + Arguments{"train.save_steps=1"};
  const std::string whole = trainer.trained("whole", arguments);
  const std::string run = trainer.trained("run", arguments);
  const std::string newest = run + "/checkpoints/step-000004/state.safetensors";
  fs::resize_file(newest, fs::file_size(newest) - 10);
  fs::remove(run + "/checkpoints/step-000003/state.json");
  const Outcome resumed = trainer.train("run", arguments + Arguments{"--resume"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("step-000004"), std::string::npos) << resumed.err;
  EXPECT_TRUE(has_event(run, "checkpoint_damaged", "step-000004: state.safetensors"));
  EXPECT_TRUE(has_event(run, "checkpoint_damaged", "step-000003: state.json is missing"));
  EXPECT_TRUE(has_event(run, "resume", "step-000002"));
  expect_equal_runs(whole, run);
}

TEST(TrainResume, DamagedCheckpointsAloneEndIt) {
  const Trainer trainer;
  const std::string run = trainer.trained("run", {"train.save_steps=2"});
  const std::string metrics = read_text(run + "/metrics.jsonl");
  for (const char* step : {"step-000002", "step-000004"}) {
    fs::remove(run + "/checkpoints/" + step + "/state.json");
  }
  // Starting again would take away what may still be mended.
  const Outcome refused = trainer.train("run", {"train.save_steps=2", "--resume"});
  expect_message(refused, 1,
                 {"step-000002: state.json is missing", "step-000004: state.json is missing",
                  run + "/checkpoints", "whole"});
  EXPECT_EQ(read_text(run + "/metrics.jsonl"), metrics);
  EXPECT_TRUE(fs::exists(run + "/checkpoints/step-000004/state.safetensors"));
  // Without any it starts again, and says so.
  fs::remove_all(run + "/checkpoints");
  const Outcome again = trainer.train("run", {"train.save_steps=2", "--resume"});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_NE(again.err.find("starts again"), std::string::npos) << again.err;
}

TEST(TrainResume, ChangedInputsAreRefused) {
  const TextModel model;
  const Trainer trainer("[model]\npath = \"" + model.path() + "\"\nmax_seq_length = 24\n" +
                        kTinyConfig.substr(kTinyConfig.find("[reward]")));
  const std::string rows = trainer.path("rows.jsonl");
  write_text(rows, "{\"prompt\":\"1+2=\"}\n");
  write_text(trainer.path("template"), "{{ messages[0].content }}");
  const Arguments data = {"data.train=" + rows, "data.eval=" + rows,
                          "data.chat_template=" + trainer.path("template")};
  const std::string run = trainer.trained("run", data + Arguments{"train.max_steps=1"});
  const std::string metrics = read_text(run + "/metrics.jsonl");
  for (const std::string& path :
       {rows, trainer.path("template"), model.path() + "/tokenizer.json",
        model.path() + "/model.safetensors", model.path() + "/generation_config.json"}) {
    const std::string before = read_text(path);
    std::string after = before;
    if (path.ends_with(".safetensors")) {
      after[after.size() - 2] ^= 1;
    } else {
      after += '\n';
    }
    write_text(path, after);
    expect_message(trainer.train("run", data + Arguments{"--resume"}), 1,
                   {path, "changed", "run.dir"});
    EXPECT_EQ(read_text(run + "/metrics.jsonl"), metrics);
    write_text(path, before);
  }
  trainer.trained("run", data + Arguments{"--resume"});
}

TEST(TrainResume, ADamagedProvenanceIsWrittenAgain) {
  const Trainer trainer;
  const std::string run = trainer.trained("run", {"train.max_steps=2"});
  const Json before = Json::parse(read_text(run + "/provenance.json"));
  for (const bool removed : {true, false}) {
    write_text(run + "/provenance.json", "{\"data\":");
    if (removed) fs::remove(run + "/provenance.json");
    const Outcome resumed = trainer.train("run", {"train.max_steps=2", "--resume"});
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_NE(resumed.err.find("provenance.json"), std::string::npos) << resumed.err;
    EXPECT_TRUE(has_event(run, "provenance_damaged", "provenance.json"));
    EXPECT_EQ(Json::parse(read_text(run + "/provenance.json")), before);
  }
}

TEST(TrainResume, FewerStepsThanTakenAreRefused) {
  const Trainer trainer;
  const std::string run = trainer.trained("run", {"train.max_steps=3"});
  const std::string config = read_text(run + "/config.toml");
  expect_message(trainer.train("run", {"train.max_steps=2", "--resume"}), 2,
                 {run, "2 steps", "3", "train.max_steps"});
  EXPECT_EQ(read_text(run + "/config.toml"), config);
}

TEST(TrainResume, AFailureIsToldInTheEvents) {
  const Trainer trainer;
  const Arguments arguments = {"train.save_steps=1"};
  const std::string whole = trainer.trained("whole", arguments);
  const std::string run = trainer.trained("run", arguments + Arguments{"train.max_steps=1"});
  // A file where a folder is to be made.
  fs::remove_all(run + "/completions");
  write_text(run + "/completions", "");
  const Outcome failed = trainer.train("run", arguments + Arguments{"--resume"});
  expect_message(failed, 1, {run + "/completions", "--resume", "step 1"});
  EXPECT_TRUE(has_event(run, "failed", "completions"));
  EXPECT_FALSE(has_event(run, "done", "step-000002"));
  fs::remove(run + "/completions");
  trainer.trained("run", arguments + Arguments{"--resume"});
  EXPECT_EQ(values_of(whole, "reward"), values_of(run, "reward"));
}

TEST(TrainResume, AFinishedRunMayGoOn) {
  const Trainer trainer;
  const Arguments constant = {"optim.lr_scheduler_type=constant"};
  const std::string whole = trainer.trained("whole", constant);
  const std::string run = trainer.trained("run", constant + Arguments{"train.max_steps=2"});
  // Nothing is left to do; then more is asked for.
  trainer.trained("run", constant + Arguments{"train.max_steps=2", "--resume"});
  trainer.trained("run", constant + Arguments{"--resume"});
  EXPECT_NE(read_text(run + "/config.toml").find("max_steps = 4"), std::string::npos);
  EXPECT_EQ(Json::parse(read_text(run + "/provenance.json"))["num_steps"], 4);
  EXPECT_EQ(read_text(whole + "/model/model.safetensors"),
            read_text(run + "/model/model.safetensors"));
  EXPECT_EQ(values_of(whole, "loss"), values_of(run, "loss"));
}

TEST(TrainResume, AnotherConfigIsRefused) {
  const Trainer trainer;
  const std::string run = trainer.trained("run", {"train.max_steps=1"});
  const std::string before = read_text(run + "/metrics.jsonl");
  const auto refused = [&](const Arguments& change, const std::vector<std::string>& words) {
    expect_message(trainer.train("run", change + Arguments{"--resume"}), 2,
                   words + std::vector<std::string>{"run/config.toml", "resumed"});
  };
  refused({"optim.learning_rate=0.5"}, {"optim.learning_rate was 0.01 and is 0.5"});
  refused({"model.init.seed=2"}, {"model.init.seed was 1 and is 2"});
  refused({"run.seed=7"}, {"run.seed"});
  refused({"run.cpu_isa=portable"}, {"run.cpu_isa"});
  refused({"precision.flow=fp8_full"}, {"load_in_fp8"});
  EXPECT_EQ(read_text(run + "/metrics.jsonl"), before);
  const Trainer on_model(tiny_config_on(tiny_model()));
  on_model.trained("run", {"train.max_steps=1"});
  expect_message(on_model.train("run", {"lora.r=8", "--resume"}), 2, {"[lora] was added"});
  // Where and how long it runs may change.
  trainer.trained("run", {"run.threads=2", "train.max_steps=2", "train.save_steps=1", "--resume"});
}

TEST(TrainResume, TheFolderMustFit) {
  const Trainer trainer;
  expect_message(trainer.train("none", {"--resume"}), 1, {trainer.path("none"), "--resume"});
  EXPECT_FALSE(fs::exists(trainer.path("none")));

  const std::string run = trainer.trained("run");
  const std::string before = read_text(run + "/metrics.jsonl");
  expect_message(trainer.train("run"), 1, {run, "another run", "--resume"});
  EXPECT_EQ(read_text(run + "/metrics.jsonl"), before);

  write_text(trainer.path("file"), "mine");
  expect_message(trainer.train("file/run"), 1, {trainer.path("file") + " is a file", "run.dir"});
  expect_message(trainer.train("file"), 1, {"is a file"});
  EXPECT_EQ(read_text(trainer.path("file")), "mine");
  expect_message(octet({"train", trainer.config(), "run.dir=/proc/octet/run"}), 1,
                 {"/proc/octet/run", "run.dir"});

  fs::create_directory(trainer.path("other"));
  write_text(trainer.path("other/notes"), "mine");
  expect_message(trainer.train("other"), 1, {trainer.path("other"), "other files"});
}

}  // namespace
}  // namespace octet::test
