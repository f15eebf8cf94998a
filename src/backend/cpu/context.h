// What every CPU op may use: the threads, the instruction set, scratch that only grows, counters.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cpu/isa.h"
#include "base/thread_pool.h"
#include "ops/quantize.h"

namespace octet::cpu {

// 64-byte aligned memory that grows and is never given back: the decode loop does not allocate.
class Scratch {
 public:
  // At least `num_bytes`, contents undefined; valid until the next call.
  void* take(int64_t num_bytes);
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  int64_t num_bytes_ = 0;
};

struct Context {
  Context(int num_threads, Isa isa);

  ThreadPool pool;
  Isa isa;
  ops::QuantizeCounters counters;
  std::vector<Scratch> thread_scratch;  // [num_threads], for the body of a parallel loop
  Scratch shared_scratch[5];            // for the calling thread, several at once by index
};

}  // namespace octet::cpu
