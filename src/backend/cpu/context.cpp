#include "backend/cpu/context.h"

#include <cstdlib>

#include "base/error.h"
#include "tensor/buffer.h"

namespace octet::cpu {

void Scratch::Free::operator()(void* data) const { std::free(data); }

void* Scratch::take(int64_t num_bytes) {
  if (num_bytes > num_bytes_) {
    data_.reset(tensor::allocate_aligned(num_bytes));
    OCTET_ASSERT(data_ != nullptr);
    num_bytes_ = num_bytes;
  }
  return data_.get();
}

Context::Context(int num_threads, Isa isa) : pool(num_threads), isa(isa) {
  thread_scratch.resize(static_cast<size_t>(pool.num_threads()));
}

}  // namespace octet::cpu
