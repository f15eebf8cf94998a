// The state of a run on disk: masters and moments of every trained parameter, and the counters that
// decide what comes next. Restoring gives the bytes back.
#pragma once

#include <string>

#include "base/json.h"
#include "train/trainer.h"

namespace octet::loop {

// Writes state.safetensors and state.json into an existing folder. `extra` is the loop's own state.
// Error where a weight or moment is not finite: such a state is never written.
void save_state(ops::Backend& backend, model::Model& model, train::Trainer& trainer,
                const Json& extra, const std::string& folder);

// Restores everything and returns `extra`. Error where the folder belongs to another model.
Json restore_state(ops::Backend& backend, model::Model& model, train::Trainer& trainer,
                   const std::string& folder);

}  // namespace octet::loop
