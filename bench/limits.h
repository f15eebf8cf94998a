// What the processor and its memory could do at most, measured with the vectors of an Isa.
#pragma once

#include <cstdint>
#include <functional>

#include "backend/cpu/isa.h"
#include "base/thread_pool.h"

namespace octet::bench {

// Seconds of one call, from the fastest of several runs of a few milliseconds: the clock of a
// virtual machine errs by microseconds. Of one thread it is the time that it ran, which others on
// the machine disturb least, of several the time that passed.
double fastest_call(int num_threads, double at_least_seconds, const std::function<void()>& call);

// GFLOP/s of one thread that only multiplies and adds in registers. A fused multiply-add counts as
// two operations.
double measure_fma_peak(cpu::Isa isa);

enum class Stream { kRead, kUpdate };  // x is added up; 1 is added to x in place

// GB/s of passes over `num_bytes` of F32 by all threads of the pool. Counts each byte once, and
// what fits a cache comes from there, as it would for a product of that size.
double measure_stream(cpu::Isa isa, ThreadPool& pool, int64_t num_bytes, Stream stream);

}  // namespace octet::bench
