// Which instruction set the kernels use. It decides the bytes of a run, so it is recorded with it.
#pragma once

#include <string_view>

namespace octet::cpu {

enum class Isa { kPortable, kAvx2, kAvx512 };

Isa best_isa();                        // of this processor
std::string_view isa_name(Isa isa);    // "portable" (SSE2 or NEON), "avx2", "avx512"
Isa parse_isa(std::string_view name);  // also "auto"; UsageError if unknown or not there

}  // namespace octet::cpu
