// Threads that share the steps of one run.
//
// One team of torch's threads per run, not one per step: at the end of a team's work all of its threads must have met, and on a machine that others
// use, too, one that waits for a core would hold up each of a network's steps. Within a run nobody waits for a thread that has not
// come: a step has ended when all of its parts are done, by whoever did them.
//
// Each thread begins with parts of its own, the same ones in each step, so that it mostly reads what it wrote itself: what another
// core has written takes longer to get than to make again. Who has done his own takes of what is left of
// the others', unless they are there and have little left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "../../nn/csrc/team.h"

namespace {

class Crew {
 public:
  const int threads;

  explicit Crew(int count) : threads(count), taken_(count > 1 ? new Taken[(size_t)count] : nullptr) {}
  Crew(const Crew&) = delete;

  // The parts of a step that one thread gets, some at a time: the fewer are left the fewer, so that all threads end at about the same time.
  class Parts {
   public:
    // The next ones, [begin, end); whether any are left.
    bool next(int64_t& begin, int64_t& end) {
      if (!fresh_ && !claim()) return false;
      fresh_ = false;
      begin = begin_, end = end_;
      return true;
    }

   private:
    friend class Crew;

    Crew& crew_;
    const uint64_t step_;
    const int64_t count_, least_;
    const int place_;
    int ahead_ = 0;  // whose parts are looked at: the thread's that many places further
    int64_t begin_ = 0, end_ = 0;
    bool fresh_ = true;  // were claimed, and not given away yet
    int64_t claimed_ = 0;

    Parts(Crew& crew, uint64_t step, uint32_t least, int place)
        : crew_(crew), step_(step >> 32), count_((int64_t)(step & 0xffffffff)), least_(least), place_(place) {}

    bool claim() {
      for (; ahead_ < crew_.threads; ahead_++) {
        const int64_t whose = (place_ + ahead_) % crew_.threads;
        const int64_t first = count_ * whose / crew_.threads, all = count_ * (whose + 1) / crew_.threads - first;
        std::atomic<uint64_t>& taken = crew_.taken_[whose].parts;
        for (uint64_t seen = taken.load(std::memory_order_acquire);;) {
          const uint64_t step = seen >> 32, known = step == step_ ? seen & 0xffffffff : 0;  // of an earlier step: none was taken yet
          const int64_t before = (int64_t)(known & ~CAME), left = all - before;
          if (step > step_ || left <= 0 || (ahead_ && known & CAME && left < least_)) break;
          const int64_t some = std::max<int64_t>(1, left / 4);
          const uint64_t now = step_ << 32 | (ahead_ ? known & CAME : CAME) | (uint64_t)(before + some);
          if (!taken.compare_exchange_weak(seen, now, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
          begin_ = first + before, end_ = begin_ + some;
          claimed_ += some;
          return true;
        }
      }
      return false;
    }
  };

  // run() on one thread; whatever it shares, all of them work on.
  template <class Run>
  void work(const Run& run) {
    in_team(threads, [&](int place) {
      if (place > 0) return serve(place);
      run();
      ended_.store(true, std::memory_order_release);
    });
  }

  // work(parts) on each thread that comes in time, which together get `count` parts; for whoever is in `work`. Where fewer than `least` are
  // left of a thread's own parts, others leave them to it, if it has come: so `work` must go on until no parts are left.
  template <class Work>
  void share(uint32_t count, uint32_t least, const Work& work) {
    call_.store([](const void* some, Parts& parts) { (*(const Work*)some)(parts); }, std::memory_order_relaxed);
    work_.store(&work, std::memory_order_relaxed);
    least_.store(least, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t step = ((step_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | count;
    step_.store(step, std::memory_order_release);
    take(step, 0);
    for (int turns = 0; done_.load(std::memory_order_acquire) < count; turns++) rest(turns);  // parts that others have begun
  }

 private:
  using Call = void (*)(const void*, Parts&);
  static constexpr uint64_t CAME = 1ull << 31;

  struct alignas(64) Taken {
    std::atomic<uint64_t> parts{0};  // a step's number (32 bits), whether the thread has come to it (1), how many of its parts were taken (31)
  };

  const std::unique_ptr<Taken[]> taken_;
  alignas(64) std::atomic<uint64_t> step_{0};  // its number (32 bits) and its parts (32)
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<uint32_t> least_{1};
  std::atomic<bool> ended_{false};
  alignas(64) std::atomic<uint32_t> done_{0};  // parts; each thread adds its own when it finds no more of them

  // What a thread gets of a step. `call_`, `work_` and `least_` were written before `step_` named the step, and are written again only when all
  // its parts are done: who gets a part has read what belongs to it, and keeps it until the work on it has returned.
  void take(uint64_t step, int place) {
    const Call call = call_.load(std::memory_order_relaxed);
    const void* work = work_.load(std::memory_order_relaxed);
    Parts parts(*this, step, least_.load(std::memory_order_relaxed), place);
    if (!parts.claim()) return;
    call(work, parts);
    done_.fetch_add((uint32_t)parts.claimed_, std::memory_order_acq_rel);
  }

  void serve(int place) {
    uint64_t before = 0;
    for (int turns = 0; !ended_.load(std::memory_order_acquire); turns++) {
      const uint64_t step = step_.load(std::memory_order_acquire);
      if (step != before) take(before = step, place), turns = 0;
      else rest(turns);
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
