// What a backend's memory and matrix units do at most, measured through its ops: the physical
// limits that speed figures stand beside.
#pragma once

#include "ops/backend.h"

namespace octet::bench {

struct DeviceLimits {
  double copy_bandwidth = 0;  // bytes per second, read and written, of a copy past the caches
  double bf16_flops = 0;      // of the fastest large product; a multiply and an add are two
  double fp8_flops = 0;       // of the fastest of the three granularities

  // A device so slow, as a CPU is, takes minutes for what a GPU does in a millisecond.
  bool slow() const { return bf16_flops < 2e13; }
};

// Takes about a second and up to 2 GiB of the backend's memory, given back.
DeviceLimits measure_device_limits(ops::Backend& backend);

// The copy's bandwidth alone.
double measure_copy_bandwidth(ops::Backend& backend);

// Seconds of one call, the best of several runs that take some hundredths of a second together.
double best_seconds(ops::Backend& backend, const std::function<void()>& body);

}  // namespace octet::bench
