#include "base/rng.h"

#include <cmath>
#include <numbers>

#include "base/error.h"

namespace octet {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

std::array<uint32_t, 4> random_words(const RngKey& key, RngUse use, uint32_t position) {
  OCTET_ASSERT(position < (1u << 24));
  return philox({key.step, key.prompt, key.sample, static_cast<uint32_t>(use) << 24 | position},
                key.seed);
}

uint32_t RandomSequence::next_word() {
  if (available_ == 0) {
    if (position_ == (1u << 24)) {  // a next block of positions, under the next sample index
      position_ = 0;
      ++key_.sample;
    }
    words_ = random_words(key_, use_, position_++);
    available_ = 4;
  }
  return words_[4 - available_--];
}

double RandomSequence::next_normal() {
  const double u = (next_word() + 1.0) * 0x1p-32;  // (0, 1]
  const double v = next_word() * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

uint32_t RandomSequence::next_below(uint32_t bound) {
  OCTET_ASSERT(bound > 0);
  const uint32_t threshold = (0u - bound) % bound;
  for (;;) {
    const uint64_t product = uint64_t{next_word()} * bound;
    if (static_cast<uint32_t>(product) >= threshold) return static_cast<uint32_t>(product >> 32);
  }
}

}  // namespace octet
