#include "model/rope_table.h"

#include <cmath>
#include <numbers>

namespace octet::model {

std::vector<float> rope_inverse_frequencies(const io::RopeConfig& rope, int64_t head_dim) {
  std::vector<float> result(static_cast<size_t>(head_dim / 2));
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    float frequency = 1.0f / std::pow(static_cast<float>(rope.theta), exponent);
    if (rope.type == io::RopeType::kLinear) frequency /= static_cast<float>(rope.factor);
    if (rope.type == io::RopeType::kLlama3) {
      const double wavelength = 2.0 * std::numbers::pi / frequency;
      const auto original = static_cast<double>(rope.original_max_position_embeddings);
      if (wavelength > original / rope.low_freq_factor) {
        frequency = static_cast<float>(frequency / rope.factor);
      } else if (wavelength >= original / rope.high_freq_factor) {
        const double smooth = (original / wavelength - rope.low_freq_factor) /
                              (rope.high_freq_factor - rope.low_freq_factor);
        frequency = static_cast<float>((1 - smooth) * frequency / rope.factor + smooth * frequency);
      }
    }
    result[i] = frequency;
  }
  return result;
}

std::vector<float> rope_table(const io::RopeConfig& rope, int64_t head_dim, int64_t num_positions) {
  const std::vector<float> frequencies = rope_inverse_frequencies(rope, head_dim);
  const int64_t half = head_dim / 2;
  std::vector<float> table(static_cast<size_t>(num_positions * head_dim));
  for (int64_t position = 0; position < num_positions; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * frequencies[i];
      table[position * head_dim + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      table[position * head_dim + half + i] =
          static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
  return table;
}

}  // namespace octet::model
