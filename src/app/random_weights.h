// Models of a known shape without a checkpoint: random weights in memory, or written to a folder.
#pragma once

#include <string>

#include "io/model_config.h"
#include "model/model.h"

namespace octet::app {

// Normal values of deviation 0.02 (unit norms, zero biases) out of one array that all parameters
// read at different places: an 8B model is filled in a second.
void fill_random_weights(ops::Backend& backend, model::Model& model);
// Device memory that this takes for its time.
int64_t random_weights_bytes(model::Model& model);

// A Hugging Face folder in BF16, in shards, of such values; made if it is not there.
void write_random_checkpoint(const std::string& folder, io::ModelConfig config);

// `count` prompts of `length` ids below `vocab_size`, from a fixed seed.
std::vector<std::vector<int32_t>> random_prompts(int64_t count, int64_t length, int64_t vocab_size);

}  // namespace octet::app
