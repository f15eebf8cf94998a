#include "observe/progress.h"

#include <cstdlib>

#include <gtest/gtest.h>

namespace octet::observe {
namespace {

struct Fake {
  std::string text;
  double now = 100;
  ProgressOptions options(bool terminal) {
    return {.label = "train",
            .total = 20,
            .terminal = terminal,
            .write = [this](std::string_view part) { text += part; },
            .seconds = [this] { return now; }};
  }
};

TEST(Progress, PlainLinesElsewhere) {
  Fake fake;
  ProgressOptions options = fake.options(false);
  options.lines_every = 5;
  Progress progress(options);
  for (int step = 1; step <= 20; ++step) {
    fake.now += 0.5;
    progress.update(step, step == 5 ? "reward 0.42" : "");
  }
  progress.finish();
  EXPECT_EQ(fake.text,
            "train 5/20  reward 0.42  2.0 step/s, 0:08 left\n"
            "train 10/20  2.0 step/s, 0:05 left\n"
            "train 15/20  2.0 step/s, 0:03 left\n"
            "train 20/20  2.0 step/s, took 0:10\n");
}

TEST(Progress, ABarOnATerminal) {
  Fake fake;
  Progress progress(fake.options(true));
  fake.now += 30;
  progress.update(10, "reward 0.5");
  EXPECT_EQ(fake.text,
            "\r\x1b[Ktrain ############............ 10/20  3.0 s/step, 0:30 left  reward 0.5");
  fake.text.clear();
  progress.message("saved");
  EXPECT_EQ(fake.text.substr(0, 10), "\r\x1b[Ksaved\n");
  fake.text.clear();
  progress.finish();
  progress.finish();
  EXPECT_EQ(fake.text, "\n");
}

TEST(Progress, AResumedRunIsTimedFromWhereItStarted) {
  Fake fake;
  ProgressOptions options = fake.options(false);
  options.start = 10;
  Progress progress(options);
  fake.now += 5;
  progress.update(15);
  EXPECT_EQ(fake.text, "train 15/20  1.0 step/s, 0:05 left\n");
}

TEST(Progress, ALongNoteStaysOnOneLine) {
  Fake fake;
  ProgressOptions options = fake.options(true);
  options.columns = 50;
  options.unicode = true;
  Progress progress(options);
  progress.update(0, std::string(200, 'x'));
  // "\r", the erasing sequence, and 49 characters of which 24 take three bytes.
  EXPECT_EQ(fake.text.size(), 4 + 49 + 24 * 2u);
}

TEST(Progress, Durations) {
  EXPECT_EQ(format_duration(7), "0:07");
  EXPECT_EQ(format_duration(245.4), "4:05");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(-1), "?");
}

TEST(Locale, TheFirstVariableThatIsSetDecides) {
  ::setenv("LC_ALL", "", 1);
  ::setenv("LC_CTYPE", "C.UTF-8", 1);
  ::setenv("LANG", "C", 1);
  EXPECT_TRUE(locale_is_utf8());
  ::setenv("LC_ALL", "POSIX", 1);
  EXPECT_FALSE(locale_is_utf8());
}

}  // namespace
}  // namespace octet::observe
