#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <sched.h>
#include <thread>
#include <vector>

#include "base/error.h"

namespace octet {
namespace {

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// How long an idle worker looks for the next loop before it sleeps: the ops of one forward follow
// each other within microseconds.
constexpr int kSpins = 4000;

}  // namespace

struct ThreadPool::State {
  const std::function<void(int64_t, int64_t, int)>* body = nullptr;
  int64_t count = 0;
  int64_t grain = 1;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> generation{0};
  bool open = false;            // under the mutex: a thread may still join the loop
  std::atomic<int> running{0};  // threads that joined it and are not done
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  std::vector<std::thread> threads;
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads > 0 ? num_threads : available_processors()),
      state_(std::make_unique<State>()) {
  for (int thread = 1; thread < num_threads_; ++thread) {
    state_->threads.emplace_back([this, thread] {
      uint64_t seen = 0;
      State& s = *state_;
      for (;;) {
        for (int spin = 0; spin < kSpins && s.generation.load(std::memory_order_acquire) == seen &&
                           !s.stop.load(std::memory_order_relaxed);
             ++spin) {
          relax();
        }
        {
          std::unique_lock lock(s.mutex);
          s.wake.wait(lock, [&] { return s.stop.load() || s.generation.load() != seen; });
          if (s.stop.load()) return;
          seen = s.generation.load();
          if (!s.open) continue;
          s.running.fetch_add(1);
        }
        work(thread);
        s.running.fetch_sub(1, std::memory_order_acq_rel);
      }
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::work(int thread) {
  State& s = *state_;
  for (;;) {
    const int64_t begin = s.next.fetch_add(s.grain, std::memory_order_relaxed);
    if (begin >= s.count) return;
    try {
      (*s.body)(begin, std::min(begin + s.grain, s.count), thread);
    } catch (...) {
      std::lock_guard lock(s.failure_mutex);
      if (!s.failure) s.failure = std::current_exception();
      s.next.store(s.count);
    }
  }
}

void ThreadPool::parallel_for(int64_t count, int64_t grain,
                              const std::function<void(int64_t, int64_t, int)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  if (num_threads_ == 1 || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) {
      body(begin, std::min(begin + grain, count), 0);
    }
    return;
  }
  State& s = *state_;
  {
    std::lock_guard lock(s.mutex);
    s.body = &body;
    s.count = count;
    s.grain = grain;
    s.next.store(0);
    s.failure = nullptr;
    s.open = true;
    s.generation.fetch_add(1, std::memory_order_release);
  }
  s.wake.notify_all();
  work(0);
  {
    // A thread that has not come yet finds nothing to do: on a busy machine nobody waits for it.
    std::lock_guard lock(s.mutex);
    s.open = false;
  }
  for (int spin = 0; s.running.load(std::memory_order_acquire) != 0; ++spin) {
    spin < kSpins ? relax() : std::this_thread::yield();
  }
  if (s.failure) std::rethrow_exception(s.failure);
}

}  // namespace octet
