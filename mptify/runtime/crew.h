// Threads that help with the steps of a run, and sleep between runs.
//
// Nobody waits for a thread that has not come: parts of the work are taken by whoever is free, and a step has ended when all of its
// parts are done. (At the end of an OpenMP region all threads must have met. One that waits for a core, on a machine that others use
// too, holds up each of a network's steps for as long as the scheduler lets it wait.)
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#ifndef _WIN32
#include <unistd.h>
#endif

namespace {

class Crew {
 public:
  // The process's own; after a fork, a new one. Never destroyed: threads of it may sleep on when the process ends.
  static Crew& get() {
    static std::atomic<Crew*> current{nullptr};
    Crew* found = current.load(std::memory_order_acquire);
    if (found && found->process_ == process()) return *found;
    Crew* fresh = new Crew;
    if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was faster
    return *found;
  }

  // Whether the crew is this run's: `threads`, the caller among them, work on what it shares until `end`. One run at a time has it.
  bool begin(int threads) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; hired_ < threads - 1; hired_++) std::thread(&Crew::serve, this, hired_).detach();
      } catch (const std::system_error&) {
        // as many as this machine grants
      }
      wanted_.store(threads - 1, std::memory_order_release);
    }
    awake_.notify_all();
    return true;
  }

  void end() {
    wanted_.store(0, std::memory_order_release);
    taken_.store(false, std::memory_order_release);
  }

  // work(part) for each of `parts` parts, fewer than 65,536.
  template <class Work>
  void share(uint32_t parts, const Work& work) {
    call_.store([](const void* some, int part) { (*(const Work*)some)(part); }, std::memory_order_relaxed);
    work_.store(&work, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t first = (uint64_t)++step_ << 32 | (uint64_t)parts << 16;
    next_.store(first, std::memory_order_release);
    take(first);
    for (int turns = 0; done_.load(std::memory_order_acquire) < parts; turns++) rest(turns);  // parts that others have begun
  }

 private:
  using Call = void (*)(const void*, int);

  std::mutex mutex_;
  std::condition_variable awake_;
  std::atomic<bool> taken_{false};
  std::atomic<int> wanted_{0};  // helpers
  int hired_ = 0;
  uint32_t step_ = 0;
  const long process_ = process();

  alignas(64) std::atomic<uint64_t> next_{0};  // a step's number (32 bits), its parts (16), and the next of them to be taken (16)
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};

  static long process() {
#ifndef _WIN32
    return (long)getpid();
#else
    return 0;
#endif
  }

  static uint32_t part_in(uint64_t seen) { return (uint32_t)seen & 0xffff; }
  static bool is_left_in(uint64_t seen) { return part_in(seen) < ((uint32_t)seen >> 16); }

  // Parts of the step that `seen` names, as long as there are any. `call_` and `work_` were written before `next_` named the step, and
  // are written again only when all its parts are done: who gets a part has read what belongs to it.
  void take(uint64_t seen) {
    for (const uint64_t step = seen >> 32; seen >> 32 == step && is_left_in(seen);) {
      const Call call = call_.load(std::memory_order_relaxed);
      const void* work = work_.load(std::memory_order_relaxed);
      if (!next_.compare_exchange_strong(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      call(work, (int)part_in(seen));
      done_.fetch_add(1, std::memory_order_acq_rel);
      seen = next_.load(std::memory_order_acquire);
    }
  }

  void serve(int number) {
    using Clock = std::chrono::steady_clock;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        awake_.wait(lock, [&] { return wanted_.load(std::memory_order_acquire) > number; });
      }
      Clock::time_point until = Clock::now();
      for (int turns = 0;; turns++) {
        const uint64_t seen = next_.load(std::memory_order_acquire);
        if (wanted_.load(std::memory_order_acquire) > number) {
          if (is_left_in(seen)) {
            take(seen);
            turns = 0;
          }
          if (turns % 64 == 0) until = Clock::now() + std::chrono::microseconds(200);  // the next run may come soon
        } else if (turns % 64 == 0 && Clock::now() > until) {
          break;
        }
        rest(turns);
      }
    }
  }

  static void rest(int turns) {
    if (turns % 4096 == 4095) return std::this_thread::yield();  // someone else may need the core
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

}  // namespace
