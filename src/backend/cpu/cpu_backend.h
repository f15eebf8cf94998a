// The default backend, and the oracle every other one is held to.
#pragma once

#include <memory>

#include "backend/cpu/isa.h"
#include "ops/backend.h"

namespace octet::cpu {

struct CpuOptions {
  int num_threads = 0;  // 0: the processors this process may use
  Isa isa = best_isa();
  int64_t memory_limit_bytes = 0;  // 0: none
};

std::unique_ptr<ops::Backend> make_cpu_backend(const CpuOptions& options);

}  // namespace octet::cpu
