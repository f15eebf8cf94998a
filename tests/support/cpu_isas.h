// The instruction sets that this processor can run.
#pragma once

#include <vector>

#include "backend/cpu/isa.h"

namespace octet::test {

inline std::vector<cpu::Isa> cpu_isas() {
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa <= cpu::best_isa()) isas.push_back(isa);
  }
  return isas;
}

}  // namespace octet::test
