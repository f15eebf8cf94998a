// Counter-based random numbers: a value is a pure function of its key and counter, so neither
// scheduling nor batching can change it.
// Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace octet {

// Four independent 32-bit words of the block `counter` under `key`.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t key);

// What a random number is for. It is part of the counter, so two uses never share a number.
enum class RngUse : uint32_t { kSample = 1, kInit = 2, kShuffle = 3, kTask = 4, kRounding = 5 };

// The counter of one random decision. Of `step`, `prompt` and `sample` 32 bits are used, of
// `position` 24.
struct RngKey {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t prompt = 0;
  uint32_t sample = 0;
};

// Four words for position `position` of the given key and use.
std::array<uint32_t, 4> random_words(const RngKey& key, RngUse use, uint32_t position);

// A float32 uniform in [0, 1) from the top 24 bits of a word.
inline float unit_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// A sequence for host-side work that is sequential by nature (initialisation, shuffles, tasks).
class RandomSequence {
 public:
  RandomSequence(const RngKey& key, RngUse use) : key_(key), use_(use) {}
  uint32_t next_word();
  float next_unit() { return unit_float(next_word()); }
  double next_normal();                 // standard normal (Box-Muller)
  uint32_t next_below(uint32_t bound);  // uniform in [0, bound), bound > 0, without bias

 private:
  RngKey key_;
  RngUse use_;
  uint32_t position_ = 0;
  int available_ = 0;
  std::array<uint32_t, 4> words_{};
};

}  // namespace octet
