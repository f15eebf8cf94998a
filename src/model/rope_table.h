// The angles of rotary embeddings, in float32 as Hugging Face computes them.
#pragma once

#include <vector>

#include "io/model_config.h"

namespace octet::model {

// D/2 inverse frequencies, default, linear or llama3 (wavelength-dependent) scaling.
std::vector<float> rope_inverse_frequencies(const io::RopeConfig& rope, int64_t head_dim);

// [num_positions, D] row-major: cos (D/2) then sin (D/2) of position × inverse frequency.
std::vector<float> rope_table(const io::RopeConfig& rope, int64_t head_dim, int64_t num_positions);

}  // namespace octet::model
