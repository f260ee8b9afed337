// One long-lived pool of threads that shares out the requests of a batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace dart {

// Cores that this process may use: its CPU affinity, capped by the quota of its cgroup (v1 or v2).
int available_cores();

// The caller of for_each() is one of the workers, so a pool of size 1 owns no thread.
// Calls from several threads are safe: they run one after the other.
class ThreadPool {
 public:
  // threads = 0 takes available_cores().
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls body(index, worker) once for every index in [0, count), worker in [0, size()).
  // Which worker takes which index is not defined; the first exception is rethrown here.
  template <typename Body>
  void for_each(int count, Body&& body) {
    run(
        count,
        [](void* context, int index, int worker) {
          (*static_cast<std::remove_reference_t<Body>*>(context))(index, worker);
        },
        &body);
  }

 private:
  using Call = void (*)(void* context, int index, int worker);

  void run(int count, Call call, void* context);
  void work(int worker);
  void drain(int worker);

  const int size_;
  // Threads do not survive fork(); the child notices by this and runs alone.
  const pid_t owner_;
  std::vector<std::thread> threads_;

  std::mutex callers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  // Guarded by mutex_.
  uint64_t round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;

  // The current round; written before it starts.
  Call call_ = nullptr;
  void* context_ = nullptr;
  int count_ = 0;
  std::atomic<int> next_{0};
};

}  // namespace dart
