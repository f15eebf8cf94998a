// What a person sees while long work goes on: a bar that redraws itself on a terminal, plain lines
// elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace octet::observe {

struct ProgressOptions {
  std::string label;  // "train"
  int64_t total = 0;
  int64_t start = 0;          // done before (a resumed run); does not count for the rate
  std::string unit = "step";  // of the rate
  bool terminal = false;      // whether `write` reaches one
  bool unicode = false;       // whether the terminal shows UTF-8
  int64_t lines_every = 1;    // elsewhere: a line where `done` is a multiple, and for the last
  int columns = 80;           // of the terminal
  std::function<void(std::string_view)> write;  // where text goes, usually standard error
  std::function<double()> seconds;              // a steady clock; empty: the system's
};

// Not thread-safe.
class Progress {
 public:
  explicit Progress(ProgressOptions options);
  ~Progress();  // as finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of `total`; `note` is shown beside it ("reward 0.42").
  void update(int64_t done, std::string_view note = {});
  // Writes a line of its own above the bar.
  void message(std::string_view text);
  // Leaves the bar as it stands and goes to a new line.
  void finish();

 private:
  std::string bar_line(int64_t done, std::string_view note) const;
  std::string status(int64_t done) const;
  ProgressOptions options_;
  double started_ = 0;
  std::string shown_;  // the bar on the terminal, "" where there is none
};

// "1:02:03", "4:05", "0:07".
std::string format_duration(double seconds);

// Standard error: is it a terminal, how wide, does it show UTF-8 (LC_ALL, LC_CTYPE, LANG)?
bool stderr_is_terminal();
int stderr_columns();
bool locale_is_utf8();

}  // namespace octet::observe
