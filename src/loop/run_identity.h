// What makes a run the run it is: its provenance, and whether a resumed run is still the same.
#pragma once

#include <string>

#include "base/json.h"
#include "loop/config.h"
#include "loop/data_source.h"
#include "loop/setup.h"
#include "ops/backend.h"

namespace octet::loop {

// provenance.json: version, build and libraries, device, model, precision, lengths, batches,
// optimiser, seeds and checksums of the data.
Json make_provenance(const ops::Backend& backend, const TrainConfig& config,
                     const ModelSource& source, const DataSource& data, int64_t num_steps);

// UsageError naming the first key that differs from the config of the run in `config_path`. How
// long a run goes on, what it logs and where it runs may change: the numbers do not depend on it,
// but for a schedule that ends with max_steps.
void check_same_run(const TrainConfig& now, const std::string& config_path);

}  // namespace octet::loop
