#include "backend/cpu/isa.h"

#include "base/error.h"

namespace octet::cpu {

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

std::string_view isa_name(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "portable";
}

Isa parse_isa(std::string_view name) {
  const Isa best = best_isa();
  if (name == "auto") return best;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (name != isa_name(isa)) continue;
    if (isa > best) {
      fail_usage("cpu_isa", "this processor offers at most \"{}\", but \"{}\" was asked for",
                 isa_name(best), name);
    }
    return isa;
  }
  fail_usage("cpu_isa", "must be auto, portable, avx2 or avx512, but is \"{}\"", name);
}

}  // namespace octet::cpu
