// What a run tells of a step's metrics.
#pragma once

#include <string>
#include <vector>

#include "observe/metrics.h"

namespace octet::loop {

// The few that stand beside the progress bar: "reward 0.42  entropy 1.3".
std::string progress_note(const observe::MetricList& metrics, bool is_rl);

// A message for each reason for which updates changed nothing; none where all were applied.
std::vector<std::string> skipped_updates(const observe::MetricList& metrics);

}  // namespace octet::loop
