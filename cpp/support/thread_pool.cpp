#include "support/thread_pool.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include <sched.h>
#include <unistd.h>

#include "support/check.h"

namespace dart {
namespace {

int affinity_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails on machines with more CPUs than cpu_set_t holds.
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  return std::max(1, CPU_COUNT(&set));
}

// Whole cores of one cgroup folder's quota, at least 1; 0 when it has none.
int quota_cores(const std::string& folder) {
  double quota = 0, period = 0;
  std::string word;
  if (std::ifstream v2(folder + "/cpu.max"); v2 >> word >> period && word != "max") {
    quota = std::strtod(word.c_str(), nullptr);
  } else if (std::ifstream v1(folder + "/cpu.cfs_quota_us"); v1 >> quota) {
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::max(1, static_cast<int>(quota / period)) : 0;
}

// Whether a comma-separated list holds `word`.
bool has_word(const std::string& list, const std::string& word) {
  std::istringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');) {
    if (item == word) return true;
  }
  return false;
}

}  // namespace

int available_cores() {
  int cores = affinity_cores();
  std::ifstream membership("/proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    // "0::/path" in v2; "4:cpu,cpuacct:/path" in v1.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string mount = "/sys/fs/cgroup";
    if (!controllers.empty()) {
      if (!has_word(controllers, "cpu")) continue;
      mount += "/cpu";
    }
    // Every ancestor's quota binds too.
    for (std::string path = line.substr(second + 1);;) {
      if (const int quota = quota_cores(mount + path)) cores = std::min(cores, quota);
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return cores;
}

ThreadPool::ThreadPool(int threads)
    : size_(threads > 0 ? threads : available_cores()),
      owner_(getpid()),
      state_(std::make_unique<State>()) {
  DART_CHECK(threads >= 0, "threads must be 0 (all cores that this process may use) or more, got ",
             threads);
  try {
    for (int worker = 1; worker < size_; ++worker) {
      state_->threads.emplace_back([state = state_.get(), worker] { work(*state, worker); });
    }
  } catch (...) {
    // The system allows no more threads.
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_) {
    static_cast<void>(state_.release());
    return;
  }
  stop();
}

void ThreadPool::stop() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->start.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::run(int count, Call call, void* context) {
  if (getpid() != owner_) {
    fail<std::runtime_error>("this thread pool belongs to process ", owner_,
                             "; make a new one after fork()");
  }
  State& state = *state_;
  std::lock_guard caller(state.callers);
  if (count <= 1 || size_ == 1) {
    for (int index = 0; index < count; ++index) call(context, index, 0);
    return;
  }
  {
    std::lock_guard lock(state.mutex);
    state.call = call;
    state.context = context;
    state.count = count;
    state.next.store(0, std::memory_order_relaxed);
    state.error = nullptr;
    state.open = true;
  }
  state.start.notify_all();
  drain(state, 0);
  std::unique_lock lock(state.mutex);
  state.open = false;
  state.done.wait(lock, [&] { return state.busy == 0; });
  if (state.error) std::rethrow_exception(state.error);
}

void ThreadPool::work(State& state, int worker) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.start.wait(lock, [&] { return state.stop || state.open; });
    if (state.stop) return;
    ++state.busy;
    lock.unlock();
    drain(state, worker);
    lock.lock();
    // Nothing is left to take.
    state.open = false;
    if (--state.busy == 0) state.done.notify_one();
  }
}

void ThreadPool::drain(State& state, int worker) {
  try {
    for (int index; (index = state.next.fetch_add(1, std::memory_order_relaxed)) < state.count;) {
      state.call(state.context, index, worker);
    }
  } catch (...) {
    std::lock_guard lock(state.mutex);
    if (!state.error) state.error = std::current_exception();
    state.next.store(state.count, std::memory_order_relaxed);
  }
}

}  // namespace dart
