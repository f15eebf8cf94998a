// What the ops over pages ask of them.
#pragma once

#include <string_view>

#include "ops/attention.h"

namespace octet::cuda {

// BF16 or E4M3 pages with scales that fit; Error naming the op otherwise.
void require_cache(std::string_view op, const ops::KvCacheView& cache);

}  // namespace octet::cuda
