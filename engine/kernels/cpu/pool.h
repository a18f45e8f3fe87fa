// Threads that share the work of one call. Knows nothing of the work.
//
// A region is one function run by all threads at once. Between regions a thread spins for about 0.1 ms, so that the
// hundreds of regions of one step follow each other without a system call, and then sleeps, so that an idle engine and
// a busy neighbour cost nothing.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>

namespace ponder {

class Pool {
 public:
  // Runs body(thread) on `threads` threads, the caller among them as thread 0, and returns when all are done.
  template <typename Body>
  void run(int threads, const Body& body) {
    if (threads <= 1) {
      body(0);
      return;
    }
    region(threads, [](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); }, &body);
  }

 private:
  using Call = void (*)(const void*, int);
  static constexpr int kSpins = 2500;
  static constexpr int kMost = 256;

  void region(int threads, Call call, const void* context) {
    std::lock_guard<std::mutex> alone(mutex_);  // engines of one process take turns
    if (threads > kMost) threads = kMost;
    for (; started_ < threads - 1; ++started_) {
      const uint32_t seen = epoch_.load();
      std::thread([this, thread = started_ + 1, seen] { work(thread, seen); }).detach();
    }
    call_ = call;
    context_ = context;
    wanted_ = threads;
    left_.store(started_, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) wake(epoch_);
    call(context, 0);
    for (int spins = 0;;) {
      const uint32_t left = left_.load(std::memory_order_acquire);
      if (left == 0) return;
      if (++spins < kSpins) {
        pause();
        continue;
      }
      caller_sleeps_.store(true);
      sleep(left_, left);
      caller_sleeps_.store(false);
    }
  }

  void work(int thread, uint32_t seen) {
    for (;;) {
      uint32_t epoch;
      for (int spins = 0; (epoch = epoch_.load(std::memory_order_acquire)) == seen;) {
        if (++spins < kSpins) {
          pause();
          continue;
        }
        sleeping_.fetch_add(1);
        sleep(epoch_, seen);
        sleeping_.fetch_sub(1);
      }
      seen = epoch;
      if (thread < wanted_) call_(context_, thread);
      if (left_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake(left_);
    }
  }

  static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  static void pause() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
  }

  std::mutex mutex_;
  int started_ = 0;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int wanted_ = 0;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> left_{0};
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
};

extern Pool& pool();

}  // namespace ponder
