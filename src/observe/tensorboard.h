// TensorBoard event files, written without protobuf: records of length, masked CRC-32C and an Event
// message (tensorflow/core/util/event.proto and framework/summary.proto).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "observe/metrics.h"

namespace octet::observe {

// Counts of values in adjacent buckets; bucket i reaches up to limits[i].
struct Histogram {
  double min = 0;
  double max = 0;
  double num = 0;
  double sum = 0;
  double sum_squares = 0;
  std::vector<double> limits;
  std::vector<double> counts;
};

// Equal buckets from the smallest to the largest value; what is not finite is left out. Without a
// value there are no buckets.
Histogram make_histogram(std::span<const float> values, int num_buckets = 64);

class TensorBoardWriter {
 public:
  // Makes FOLDER/events.out.tfevents.TIME.HOST.PID.0. With first_step > 0 (a resumed run) readers
  // are told to forget what earlier files say of steps from first_step on.
  explicit TensorBoardWriter(const std::string& folder, int64_t first_step = 0);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  void scalars(int64_t step, const MetricList& metrics);  // one event; NaN and infinities left out
  void histogram(int64_t step, std::string_view tag, const Histogram& histogram);
  const std::string& path() const { return path_; }

 private:
  void write_event(std::string_view fields);
  std::string path_;
  int file_ = -1;
};

}  // namespace octet::observe
