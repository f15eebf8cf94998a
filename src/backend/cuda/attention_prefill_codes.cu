// The attention forward for many new tokens over E4M3 pages: blocks of a few warps that bring keys
// and values (device/prefill_codes.cuh) and of consumers with 64 query rows each, on wgmma's FP8
// products. The arithmetic of a row is the class of attention_codes.cuh.
#include <algorithm>

#include "backend/cuda/attention.h"
#include "backend/cuda/checks.h"
#include "backend/cuda/device/prefill_codes_consumer.cuh"
#include "backend/cuda/tensor_map.h"

namespace octet::cuda {
namespace {

template <class Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1)
    prefill_codes_kernel(const __grid_constant__ PrefillProblem p,
                         const __grid_constant__ CUtensorMap key_map) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kStages; ++slot) {
      barrier_init(base + Layout::kKeysHere + 8 * slot, 1);
      barrier_init(base + Layout::kKeysEmpty + 8 * slot, 4 * Layout::kConsumers);
      barrier_init(base + Layout::kValuesHere + 8 * slot, 1);
      barrier_init(base + Layout::kValuesReady + 8 * slot, 1);
      barrier_init(base + Layout::kValuesEmpty + 8 * slot, 4 * Layout::kConsumers);
    }
    for (int slot = 0; slot < Layout::kItemSlots; ++slot) {
      barrier_init(base + Layout::kItemFull + 8 * slot, 1);
    }
    barrier_fence_init();
  }
  // Values that were never copied are not NaN either.
  auto* values = reinterpret_cast<uint4*>(shared + Layout::kValues);
  for (int i = threadIdx.x; i < Layout::kStages * Layout::kChunkBytes / 16; i += Layout::kThreads) {
    values[i] = {};
  }
  fence_async_proxy();
  __syncthreads();
  PrefillSchedule<Layout> schedule(p, shared);
  if (threadIdx.x >= 128 * Layout::kConsumers) {
    give_registers<Layout::kProducerRegisters>();
    const int warp = uniform(static_cast<int>(threadIdx.x / 32)) - 4 * Layout::kConsumers;
    if (warp == 0) {
      CodesCopier<Layout> copier(p, &key_map, base);
      schedule.post();
      for (;;) {
        const PrefillItem item = schedule.next();
        if (item.sequence < 0) break;
        schedule.post();
        copier.run(item);
      }
    } else if (warp == 1) {
      CodesReadier<Layout> readier(p, shared);
      for (;;) {
        const PrefillItem item = schedule.next();
        if (item.sequence < 0) break;
        readier.run(item);
      }
    }
  } else {
    take_registers<Layout::kConsumerRegisters>();
    CodesConsumer<Layout> consumer(p, shared);
    consumer.consume(schedule);
  }
}

template <int kWidth, bool kWindowed>
void launch(Context& context, PrefillProblem& p, const ops::KvCacheView& cache) {
  using Layout = CodesLayout<kWidth, kWindowed>;
  const auto kernel = prefill_codes_kernel<Layout>;
  static const bool ready = allow_shared(kernel, Layout::kBytes);
  (void)ready;
  const CUtensorMap key_map = key_map_of(cache);
  p.num_items = PrefillSchedule<Layout>::num_items(p);
  p.next_item = context.scratch<int>(kScratchAttention, 1);
  check(cudaMemsetAsync(p.next_item, 0, sizeof(int), context.stream()), "attention");
  const auto blocks = static_cast<unsigned>(std::min(p.num_items, context.num_multiprocessors()));
  kernel<<<blocks, Layout::kThreads, Layout::kBytes, context.stream()>>>(p, key_map);
  check_launch("attention");
}

}  // namespace

void attention_prefill_codes(Context& context, const AttentionProblem& p,
                             const ops::KvCacheView& cache) {
  if (int64_t{p.num_tokens} * p.group >= kMostPrefillRows) {
    fail("attention",
         "at most {} rows of queries and heads go at once, but {} x {} are given; take "
         "fewer tokens a step",
         kMostPrefillRows, p.num_tokens, p.group);
  }
  PrefillProblem problem = prefill_problem(p);
  if (p.keys.width == 64) {
    p.window == 0 ? launch<64, false>(context, problem, cache)
                  : launch<64, true>(context, problem, cache);
  } else {
    p.window == 0 ? launch<128, false>(context, problem, cache)
                  : launch<128, true>(context, problem, cache);
  }
}

}  // namespace octet::cuda
