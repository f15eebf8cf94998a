// The attention forward for many new tokens: blocks of a producer warpgroup, which brings keys and
// values as 16-bit operands, and of consumers with 64 query rows each, on wgmma. The arithmetic of
// a row is the class of attention_tile.cuh: FP16 and BF16 products of wgmma and mma.sync have the
// same bits when the same sixteen terms meet in each step.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/prefill_consumer.cuh"
#include "backend/cuda/device/prefill_producer.cuh"

namespace octet::cuda {
namespace {

// Of a thread; 128 at the start of four warpgroups.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 152;

template <bool kFp8, int kWidth>
__global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    prefill_kernel(const __grid_constant__ PrefillProblem p) {
  using Layout = PrefillLayout<kFp8, kWidth>;
  extern __shared__ __align__(1024) char shared[];
  using Producer = std::conditional_t<kFp8, PrefillConverter<kWidth>, PrefillCopier<kWidth>>;
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kSlots; ++slot) {
      barrier_init(base + Layout::kFull + 8 * slot, Producer::kArrivals);
      barrier_init(base + Layout::kEmpty + 8 * slot, 4 * kConsumers);
    }
    for (int slot = 0; slot < Layout::kRawSlots; ++slot) {
      barrier_init(base + Layout::kRawFull + 8 * slot, 1);
    }
    for (int slot = 0; slot < Layout::kItemSlots; ++slot) {
      barrier_init(base + Layout::kItemFull + 8 * slot, 1);
    }
    barrier_fence_init();
  }
  __syncthreads();
  PrefillSchedule<Layout> schedule(p, shared);
  if (threadIdx.x >= 128 * kConsumers) {
    give_registers<kProducerRegisters>();
    Producer producer(p, base);
    const bool posts = threadIdx.x < 128 * kConsumers + 32;
    if (posts) schedule.post();
    for (;;) {
      const PrefillItem item = schedule.next();
      if (item.sequence < 0) break;
      if (posts) schedule.post();
      producer.run(item);
    }
  } else {
    take_registers<kConsumerRegisters>();
    PrefillConsumer<kFp8, kWidth> consumer(p, shared);
    PrefillItem item = schedule.next();
    if (item.sequence >= 0) consumer.fetch(item);
    while (item.sequence >= 0) {
      consumer.run(item);
      const PrefillItem done = item;
      item = schedule.next();
      if (item.sequence >= 0) consumer.fetch(item);
      consumer.write(done);
    }
  }
}

template <bool kFp8, int kWidth>
void launch(Context& context, PrefillProblem& p) {
  using Layout = PrefillLayout<kFp8, kWidth>;
  const auto kernel = prefill_kernel<kFp8, kWidth>;
  static const bool ready = allow_shared(kernel, Layout::kBytes);
  (void)ready;
  p.num_items = (p.num_tokens * p.group / Layout::kRows + p.num_sequences) * p.keys.heads;
  p.next_item = context.scratch<int>(kScratchAttention, 1);
  check(cudaMemsetAsync(p.next_item, 0, sizeof(int), context.stream()), "attention");
  const auto blocks = static_cast<unsigned>(std::min(p.num_items, context.num_multiprocessors()));
  kernel<<<blocks, Layout::kThreads, Layout::kBytes, context.stream()>>>(p);
  check_launch("attention");
}

}  // namespace

bool attention_prefill(Context& context, const AttentionProblem& p, bool fp8) {
  constexpr int64_t kMostRows = int64_t{1} << 27;
  const int width = p.keys.width;
  if (fp8 || context.portable() || (width != 64 && width != 128) || p.keys.page_shift < 4 ||
      int64_t{p.num_tokens} * p.group >= kMostRows || p.group > 32 || p.q_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(p.q) % 16 != 0) {
    return false;
  }
  PrefillProblem problem{p, 0, 0, nullptr};
  if (p.group > 1) {
    problem.group_inverse = static_cast<uint32_t>(divide_up(int64_t{1} << 32, p.group));
  }
  const auto run = [&](auto kernel_fp8) {
    constexpr bool kFp8 = decltype(kernel_fp8)::value;
    width == 64 ? launch<kFp8, 64>(context, problem) : launch<kFp8, 128>(context, problem);
  };
  fp8 ? run(std::true_type()) : run(std::false_type());
  return true;
}

}  // namespace octet::cuda
