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
    : size_(threads > 0 ? threads : available_cores()), owner_(getpid()) {
  DART_CHECK(threads >= 0, "threads must be 0 (all cores that this process may use) or more, got ",
             threads);
  threads_.reserve(size_ - 1);
  for (int worker = 1; worker < size_; ++worker) {
    threads_.emplace_back([this, worker] { work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int count, Call call, void* context) {
  if (count <= 1 || size_ == 1 || getpid() != owner_) {
    for (int index = 0; index < count; ++index) call(context, index, 0);
    return;
  }
  std::lock_guard caller(callers_);
  {
    std::lock_guard lock(mutex_);
    call_ = call;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    error_ = nullptr;
    busy_ = static_cast<int>(threads_.size());
    ++round_;
  }
  start_.notify_all();
  drain(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::work(int worker) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    lock.unlock();
    drain(worker);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void ThreadPool::drain(int worker) {
  try {
    for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      call_(context_, index, worker);
    }
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    next_.store(count_, std::memory_order_relaxed);
  }
}

}  // namespace dart
