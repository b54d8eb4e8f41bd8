// Threads that share the steps of one run.
//
// One team of torch's threads per run, not one per step: at the end of a team's work all of its threads must have met, and on a machine that others
// use, too, one that waits for a core would hold up each of a network's steps. Within a run nobody waits for a thread that has not
// come: parts of a step are taken by whoever is free, and it has ended when all of its parts are done.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "../native/team.h"

namespace {

class Crew {
 public:
  const int threads;

  explicit Crew(int count) : threads(count) {}
  Crew(const Crew&) = delete;

  // run() on one thread; whatever it shares, all of them work on.
  template <class Run>
  void work(const Run& run) {
    in_team(threads, [&](int place) {
      if (place > 0) return serve();
      run();
      ended_.store(true, std::memory_order_release);
    });
  }

  // part_of(part) for each of `parts` parts, fewer than 65,536; for whoever is in `work`.
  template <class Part>
  void share(uint32_t parts, const Part& part_of) {
    call_.store([](const void* some, int part) { (*(const Part*)some)(part); }, std::memory_order_relaxed);
    work_.store(&part_of, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t first = (uint64_t)++step_ << 32 | (uint64_t)parts << 16;
    next_.store(first, std::memory_order_release);
    take(first);
    for (int turns = 0; done_.load(std::memory_order_acquire) < parts; turns++) rest(turns);  // parts that others have begun
  }

 private:
  using Call = void (*)(const void*, int);

  uint32_t step_ = 0;
  alignas(64) std::atomic<uint64_t> next_{0};  // a step's number (32 bits), its parts (16), and the next of them to be taken (16)
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<bool> ended_{false};
  alignas(64) std::atomic<uint32_t> done_{0};

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

  void serve() {
    for (int turns = 0; !ended_.load(std::memory_order_acquire); turns++) {
      const uint64_t seen = next_.load(std::memory_order_acquire);
      if (is_left_in(seen)) take(seen), turns = 0;
      rest(turns);
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
