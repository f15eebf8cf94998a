// The attention forward for many new tokens over BF16 pages: blocks of a producer warpgroup, which
// brings keys and values, and of consumers with 64 query rows each, on wgmma. The arithmetic of a
// row is the class of attention_tile.cuh: products of wgmma and mma.sync have the same bits when
// the same sixteen terms meet in each step.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/prefill_consumer.cuh"
#include "backend/cuda/device/prefill_producer.cuh"
#include "backend/cuda/launch.cuh"

namespace octet::cuda {
namespace {

// Of a thread; 128 at the start of four warpgroups.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 152;

template <int kWidth>
__global__ void __launch_bounds__(PrefillLayout<kWidth>::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillProblem p) {
  using Layout = PrefillLayout<kWidth>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kSlots; ++slot) {
      barrier_init(base + Layout::kFull + 8 * slot, PrefillCopier<kWidth>::kArrivals);
      barrier_init(base + Layout::kEmpty + 8 * slot, 4 * Layout::kConsumers);
    }
    for (int slot = 0; slot < Layout::kItemSlots; ++slot) {
      barrier_init(base + Layout::kItemFull + 8 * slot, 1);
    }
    barrier_fence_init();
  }
  __syncthreads();
  await_predecessor();
  PrefillSchedule<Layout> schedule(p, shared);
  if (threadIdx.x >= 128 * Layout::kConsumers) {
    give_registers<kProducerRegisters>();
    PrefillCopier<kWidth> producer(p, base);
    const bool posts = threadIdx.x < 128 * Layout::kConsumers + 32;
    if (posts) schedule.post();
    for (;;) {
      const PrefillItem item = schedule.next();
      if (item.sequence < 0) break;
      if (posts) schedule.post();
      producer.run(item);
    }
  } else {
    take_registers<kConsumerRegisters>();
    PrefillConsumer<kWidth> consumer(p, shared);
    schedule.consume(consumer);
  }
}

template <int kWidth>
void launch_width(Context& context, PrefillProblem& p) {
  using Layout = PrefillLayout<kWidth>;
  const auto kernel = prefill_kernel<kWidth>;
  static const bool ready = allow_shared(kernel, Layout::kBytes);
  (void)ready;
  p.num_items = PrefillSchedule<Layout>::num_items(p);
  p.prefilled = context.prefill_queue();
  p.next_item = &p.prefilled->next_item;
  const auto blocks = static_cast<unsigned>(std::min(p.num_items, context.num_multiprocessors()));
  launch("attention", context,
         {.grid = dim3(blocks), .num_threads = Layout::kThreads, .shared_bytes = Layout::kBytes},
         kernel, p);
}

}  // namespace

void attention_prefill(Context& context, AttentionProblem& p) {
  const int width = p.keys.width;
  if (context.portable() || (width != 64 && width != 128) || p.keys.page_shift < 4 ||
      int64_t{p.num_tokens} * p.group >= kMostPrefillRows || p.group > 32 || p.q_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(p.q) % 16 != 0) {
    return;
  }
  PrefillProblem problem = prefill_problem(p);
  width == 64 ? launch_width<64>(context, problem) : launch_width<128>(context, problem);
  p.prefilled = problem.prefilled;
}

}  // namespace octet::cuda
