// A fixed set of threads for loops whose iterations are independent. Results never depend on the
// number of threads: an iteration owns what it writes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace octet {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread; 0 takes the number of processors this process may use.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs body(begin, end, thread) over a partition of [0, count) into ranges of `grain` (the last
  // may be shorter), in any order and on any thread; returns when all are done. The caller takes
  // part. An exception of the body is rethrown here. Not reentrant, and one caller at a time.
  void parallel_for(int64_t count, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end, int thread)>& body);

 private:
  struct State;
  void work(int thread);
  int num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace octet
