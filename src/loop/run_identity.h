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
// optimiser, seeds and checksums of the data and of the model's files.
Json make_provenance(const ops::Backend& backend, const TrainConfig& config,
                     const ModelSource& source, const DataSource& data, int64_t num_steps);

// UsageError naming the first key that differs from the config of the run in `config_path`. How
// long a run goes on, what it logs and where it runs may change: the numbers do not depend on it,
// but for a schedule that ends with max_steps.
void check_same_run(const TrainConfig& now, const std::string& config_path);

// The provenance of an earlier run; an empty object and the reason in `problem` where it cannot be
// read.
Json read_provenance(const std::string& path, std::string& problem);

// Error naming the first file of the data, the model or its chat template whose checksum differs
// between the provenance of a run and what it would read `now`. What `before` does not hold is not
// compared.
void check_same_inputs(const Json& now, const Json& before);

}  // namespace octet::loop
