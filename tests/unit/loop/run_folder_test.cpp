#include "loop/run_folder.h"

#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"

namespace octet::loop {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::temp_directory_path() / fmt::format("octet-run-{}-{}", info->name(), ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path(const std::string& name) const { return (root_ / name).string(); }

  RunFolder create(const std::string& name = "runs/a") const {
    return RunFolder::create(path(name), "[run]\n", Json{{"version", "1"}});
  }

  static std::string save(const RunFolder& run, int64_t step, const std::string& content) {
    return run.save_checkpoint(step, [&](const std::string& folder) {
      write_file_atomically(folder + "/weights.bin", content);
      fs::create_directories(folder + "/optimiser");
      write_file_atomically(folder + "/optimiser/moments.bin", content + content);
    });
  }

  static std::string message(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path root_;
};

TEST_F(RunFolderTest, ANewRunIsMadeAndNotOverwritten) {
  {
    const RunFolder run = create();
    EXPECT_EQ(read_file(run.config_path()), "[run]\n");
    EXPECT_EQ(read_json_file(run.provenance_path())["version"], "1");
    EXPECT_NE(message([&] { RunFolder::open(path("runs/a")); }).find("another process"),
              std::string::npos);
  }
  EXPECT_NE(message([&] { create(); }).find("--resume"), std::string::npos);
  EXPECT_EQ(read_file(path("runs/a/config.toml")), "[run]\n");
  const RunFolder again = RunFolder::open(path("runs/a"));
  EXPECT_TRUE(again.checkpoints().empty());
}

TEST_F(RunFolderTest, AFileInTheWayIsNamed) {
  write_file_atomically(path("runs"), "a file");
  EXPECT_NE(message([&] { create(); }).find(path("runs") + " is a file"), std::string::npos);
  EXPECT_NE(message([&] { create("runs"); }).find(path("runs") + " is a file"), std::string::npos);
  EXPECT_EQ(read_file(path("runs")), "a file");
  EXPECT_NE(message([&] { RunFolder::open(path("nowhere")); }).find("--resume"), std::string::npos);
  fs::create_directories(path("other"));
  write_file_atomically(path("other/notes.txt"), "mine");
  EXPECT_NE(message([&] { create("other"); }).find("other files"), std::string::npos);
}

TEST_F(RunFolderTest, AFolderThatCannotBeFilledIsTakenBack) {
  // Bytes that are no UTF-8 end the second file, as a full disk would.
  EXPECT_ANY_THROW(RunFolder::create(path("runs/b"), "[run]\n", Json{{"version", "\xff"}}));
  EXPECT_FALSE(fs::exists(path("runs/b")));
}

TEST_F(RunFolderTest, CheckpointsComeNewestFirstAndRotate) {
  const RunFolder run = create();
  for (const int64_t step : {20, 1000000, 100, 3}) save(run, step, "x");
  std::vector<int64_t> steps;
  for (const auto& place : run.checkpoints()) steps.push_back(place.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{1000000, 100, 20, 3}));
  EXPECT_TRUE(fs::exists(run.checkpoints_path() + "/step-000020/optimiser/moments.bin"));
  run.rotate_checkpoints(0);
  EXPECT_EQ(run.checkpoints().size(), 4u);
  run.rotate_checkpoints(2);
  ASSERT_EQ(run.checkpoints().size(), 2u);
  EXPECT_EQ(run.checkpoints().back().step, 100);
  run.drop_after(100);
  ASSERT_EQ(run.checkpoints().size(), 1u);
  EXPECT_EQ(run.checkpoints()[0].step, 100);
}

TEST_F(RunFolderTest, ASaveThatFailsLeavesNoTrace) {
  const RunFolder run = create();
  save(run, 20, "old");
  EXPECT_THROW(run.save_checkpoint(20,
                                   [](const std::string& folder) {
                                     write_file_atomically(folder + "/weights.bin", "half");
                                     throw std::runtime_error("disk full");
                                   }),
               std::runtime_error);
  EXPECT_EQ(read_file(run.checkpoints_path() + "/step-000020/weights.bin"), "old");
  EXPECT_FALSE(fs::exists(run.checkpoints_path() + "/step-000020.tmp"));
  save(run, 20, "new");
  EXPECT_EQ(read_file(run.checkpoints_path() + "/step-000020/weights.bin"), "new");
}

// Killed at any time while it replaces a checkpoint by another of the same step, a process leaves
// one of the two.
TEST_F(RunFolderTest, AKillWhileACheckpointIsReplacedLosesNone) {
  save(create(), 20, "first");
  for (int kill_count = 0; kill_count < 60; ++kill_count) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const RunFolder run = RunFolder::open(path("runs/a"));
      for (bool told = false; true; told = true) {
        save(run, 20, "again");
        if (!told && ::write(ready[1], "x", 1) != 1) ::_exit(1);
      }
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::usleep(static_cast<useconds_t>(137 * kill_count));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
    std::vector<std::string> problems;
    const auto whole = RunFolder::open(path("runs/a")).newest_whole_checkpoint(problems);
    ASSERT_TRUE(whole && problems.empty()) << fmt::format("{}", fmt::join(problems, "; "));
  }
}

// Where the moment between the two renames is the last one.
TEST_F(RunFolderTest, WhatWasBeingReplacedComesBack) {
  const std::string place = save(create(), 20, "old");
  fs::rename(place, place + ".old");
  fs::create_directories(path("runs/a/adapter.old"));
  fs::create_directories(path("runs/a/model.old"));
  fs::create_directories(path("runs/a/model"));
  const RunFolder run = RunFolder::open(path("runs/a"));
  EXPECT_EQ(checkpoint_problem(place), "");
  EXPECT_TRUE(fs::exists(path("runs/a/adapter")));
  for (const char* name : {"adapter.old", "model.old", "checkpoints/step-000020.old"}) {
    EXPECT_FALSE(fs::exists(path("runs/a/") + name)) << name;
  }
}

TEST_F(RunFolderTest, ADamagedCheckpointIsReportedAndPassedOver) {
  const RunFolder run = create();
  for (int64_t step = 1; step <= 6; ++step) save(run, step, "weights of " + std::to_string(step));
  const auto place = [&](int step) {
    return fmt::format("{}/step-{:06}", run.checkpoints_path(), step);
  };
  fs::resize_file(place(6) + "/weights.bin", 4);                      // cut short
  write_file_atomically(place(5) + "/weights.bin", "weights of 4");   // a byte changed
  fs::remove(place(4) + "/optimiser/moments.bin");                    // missing
  write_file_atomically(place(3) + "/manifest.json", "{\"files\":");  // no JSON
  write_file_atomically(place(2) + "/more.bin", "");                  // not listed
  std::vector<std::string> problems;
  const auto whole = run.newest_whole_checkpoint(problems);
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(whole->step, 1);
  ASSERT_EQ(problems.size(), 5u);
  const char* expected[] = {"should have 12 bytes, but has 4", "has changed",
                            "moments.bin is missing", "valid JSON",
                            "more.bin is not in manifest.json"};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NE(problems[i].find(expected[i]), std::string::npos) << problems[i];
  }
  fs::remove(place(1) + "/manifest.json");
  EXPECT_FALSE(run.newest_whole_checkpoint(problems).has_value());
}

TEST_F(RunFolderTest, AHostileManifestIsNoCheckpoint) {
  const RunFolder run = create();
  const std::string place = save(run, 1, "x");
  for (const char* manifest :
       {"[]", "{}", "{\"files\":[]}", "{\"files\":{\"weights.bin\":1}}",
        "{\"files\":{\"weights.bin\":{\"size\":-1,\"crc32c\":0}}}",
        "{\"files\":{\"weights.bin\":{\"size\":1,\"crc32c\":1e300}}}",
        "{\"files\":{\"../../config.toml\":{\"size\":6,\"crc32c\":0}}}", "{\"files\":{}}"}) {
    write_file_atomically(place + "/manifest.json", manifest);
    EXPECT_NE(checkpoint_problem(place), "") << manifest;
  }
}

TEST_F(RunFolderTest, ResumingRemovesWhatAWriteLeftAside) {
  { create(); }
  fs::create_directories(path("runs/a/checkpoints/step-000005.tmp"));
  fs::create_directories(path("runs/a/model.tmp"));
  const RunFolder run = RunFolder::open(path("runs/a"));
  EXPECT_FALSE(fs::exists(path("runs/a/checkpoints/step-000005.tmp")));
  EXPECT_FALSE(fs::exists(path("runs/a/model.tmp")));
  const std::string model = run.save_folder("model", [](const std::string& folder) {
    write_file_atomically(folder + "/config.json", "{}");
  });
  EXPECT_EQ(model, run.dir() + "/model");
  EXPECT_EQ(read_file(model + "/config.json"), "{}");
}

}  // namespace
}  // namespace octet::loop
