// One long-lived pool of threads that shares out the requests of a batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
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
  // Which worker takes which index is not defined. Rethrows the first exception; throws
  // std::runtime_error in a process that was forked after the pool was made.
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

  // Left alone in a forked child, where its threads do not exist: even to destroy it would wait
  // for them.
  struct State {
    std::vector<std::thread> threads;
    std::mutex callers;
    std::mutex mutex;
    std::condition_variable start;
    std::condition_variable done;
    // Guarded by mutex. A thread joins a round while it is open; one that wakes too late does not,
    // so that nobody waits for it.
    bool open = false;
    int busy = 0;
    bool stop = false;
    std::exception_ptr error;
    // The current round; written before it starts.
    Call call = nullptr;
    void* context = nullptr;
    int count = 0;
    std::atomic<int> next{0};
  };

  void run(int count, Call call, void* context);
  void stop();
  static void work(State& state, int worker);
  static void drain(State& state, int worker);

  const int size_;
  const pid_t owner_;
  std::unique_ptr<State> state_;
};

}  // namespace dart
