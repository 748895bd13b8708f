// Two pools that spin against each other cost tens of percent of a decoding step, so when libgomp is already in the
// process (PyTorch brings it) its team is used: found among the loaded libraries, never linked to. After a fork libgomp
// hangs in the child; the child therefore uses a fresh pool of our own.
#include "parallel.h"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace softlookup {
namespace {

struct Job {
  int64_t count;
  void (*body)(void* context, int64_t index);
  void* context;
  std::atomic<int64_t> next{0};
};

void work(Job& job) {
  for (int64_t index = job.next.fetch_add(1); index < job.count; index = job.next.fetch_add(1)) {
    job.body(job.context, index);
  }
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  void run(Job& job, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      helpers = grow(helpers);
      job_ = &job;
      wanted_ = helpers;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(job);
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // who wakes up too late finds nothing, and is not waited for
    lock.unlock();
    spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
    lock.lock();
    done_.wait(lock, [this] { return running_.load() == 0; });
  }

  bool is_awake() const { return spinning_.load(std::memory_order_relaxed) > 0; }

 private:
  // The gap between two layers of a small model. Pauses differ tenfold between CPUs, so time is what is counted.
  static constexpr std::chrono::microseconds patience{100};

  template <class Condition>
  static void spin_until(const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + patience;
    while (!holds()) {
      for (int i = 0; i < 16 && !holds(); ++i) pause();
      if (std::chrono::steady_clock::now() > end) return;
    }
  }

  // As many workers as the system gives, up to what is wanted.
  int grow(int helpers) {
    while (workers_ < helpers) {
      try {
        std::thread(&Pool::serve, this, workers_, generation_.load()).detach();
      } catch (const std::system_error&) {
        return workers_;
      }
      ++workers_;
    }
    return helpers;
  }

  void serve(int number, uint64_t seen) {
    for (;;) {
      spinning_.fetch_add(1, std::memory_order_relaxed);
      spin_until([this, seen] { return generation_.load(std::memory_order_acquire) != seen; });
      spinning_.fetch_sub(1, std::memory_order_relaxed);
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this, seen] { return generation_.load() != seen; });
      seen = generation_.load();
      if (number >= wanted_ || !job_) continue;
      Job& job = *job_;
      running_.fetch_add(1);
      lock.unlock();
      work(job);
      lock.lock();
      if (running_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<uint64_t> generation_{0};
  Job* job_ = nullptr;
  int wanted_ = 0;
  std::atomic<int> running_{0};   // helpers at work; changed under the lock only
  std::atomic<int> spinning_{0};  // workers that would notice a job at once
  int workers_ = 0;
};

struct Threads {
  Pool* pool = new Pool;  // never destroyed: its workers may outlive the interpreter
  std::atomic<bool> busy{false};
  bool forked = false;
};

Threads& threads_of_process() {
  static Threads* threads = [] {
    auto* created = new Threads;
    pthread_atfork(nullptr, nullptr, [] {
      // The parent's workers do not exist here, and its locks may be held by nobody: both are left behind.
      Threads& child = threads_of_process();
      child.pool = new Pool;
      child.busy.store(false);
      child.forked = true;
    });
    return created;
  }();
  return *threads;
}

using OpenmpParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// How many libraries the process has loaded so far; 0 where the system does not tell.
uint64_t libraries_loaded() {
  uint64_t count = 0;
#if defined(__linux__)
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<uint64_t*>(data) = info->dlpi_adds;
        return 1;
      },
      &count);
#endif
  return count;
}

OpenmpParallel openmp_parallel() {
  if (threads_of_process().forked) return nullptr;
  static std::atomic<OpenmpParallel> found{nullptr};
  if (OpenmpParallel known = found.load(std::memory_order_relaxed)) return known;
  // Looking for a library that is not there reads files and maps memory, which takes longer than a small lookup.
  static std::atomic<uint64_t> looked_at{0};
  const uint64_t loaded = libraries_loaded();
  if (loaded != 0 && looked_at.exchange(loaded, std::memory_order_relaxed) == loaded) return nullptr;
  void* library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  const auto symbol = reinterpret_cast<OpenmpParallel>(dlsym(library, "GOMP_parallel"));
  found.store(symbol, std::memory_order_relaxed);
  return symbol;
}

}  // namespace

void parallel_for(int64_t count, int threads, void (*body)(void* context, int64_t index), void* context) {
  Job job{count, body, context};
  const int team = static_cast<int>(count < threads ? count : threads);
  Threads& process = threads_of_process();
  if (team <= 1 || process.busy.exchange(true)) {
    work(job);
    return;
  }
  if (OpenmpParallel parallel = openmp_parallel()) {
    parallel([](void* data) { work(*static_cast<Job*>(data)); }, &job, static_cast<unsigned>(team), 0);
  } else {
    process.pool->run(job, team - 1);
  }
  process.busy.store(false);
}

void watch_forks() { threads_of_process(); }

bool team_is_awake() { return openmp_parallel() != nullptr || threads_of_process().pool->is_awake(); }

const char* thread_backend() { return openmp_parallel() ? "openmp" : "pool"; }

}  // namespace softlookup
