// The threads that share the loops of one run: torch's OpenMP threads, one parallel region per run.
//
// The calling thread runs the steps of a program; the others help with each loop. A loop is
// scheduled like OpenMP's `for schedule(guided)`: threads take chunks from a shared counter, the
// smaller the fewer are left. But there is no barrier: a loop has ended when all of its chunks are
// done, whoever did them, and no thread waits for one that the system has not scheduled.
//
// ResNet-18 on two threads (AMD EPYC, two cores). Idle: the speedup over one thread that
// `mptify bench inference resnet18 --threads 2 --no-nodes --rounds 15` shows, median of at least
// three alternating runs. Busy: mean milliseconds per image beside two busy loops, two runs of 60.
//
//                                                       idle   busy
//     work stealing, as it was here before              1.79   3, 16
//     this                                              1.81   5, 25
//     OpenMP's guided schedule, a barrier per loop      1.78   40, 111
//     OpenMP's dynamic schedule, 4 chunks per thread    1.73   -
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "../../nn/csrc/parallel.h"

namespace {

class ThreadPool {
 public:
  const int threads;

  explicit ThreadPool(int count) : threads(count) {}
  ThreadPool(const ThreadPool&) = delete;

  // The chunks of a loop over [0, count) that one thread gets.
  class Chunks {
   public:
    // The next range; false if none is left.
    bool next(int64_t& begin, int64_t& end) {
      if (!is_claimed_ && !claim()) return false;
      is_claimed_ = false;
      begin = count_ * first_ / total_, end = count_ * last_ / total_;
      return true;
    }

   private:
    friend class ThreadPool;

    ThreadPool& pool_;
    const uint64_t loop_;
    const int64_t count_, total_;  // total_ chunks
    int64_t first_ = 0, last_ = 0, done_ = 0;
    bool is_claimed_ = false;  // and not returned yet

    Chunks(ThreadPool& pool, uint64_t loop, int64_t count, int64_t total)
        : pool_(pool), loop_(loop), count_(count), total_(total) {}

    bool claim() {
      uint64_t seen = pool_.next_.load(std::memory_order_acquire);
      do {
        first_ = (int64_t)(seen & LOW);
        if (seen >> 32 != loop_ || first_ >= total_) return false;  // the loop has ended
        last_ = first_ + std::max<int64_t>(1, (total_ - first_) / pool_.threads);
      } while (!pool_.next_.compare_exchange_weak(
          seen, loop_ << 32 | (uint64_t)last_, std::memory_order_acq_rel,
          std::memory_order_acquire));
      done_ += last_ - first_;
      return is_claimed_ = true;
    }
  };

  // run() on the calling thread, while the others help with its loops.
  template <class Run>
  void work(const Run& run) {
    run_parallel(threads, [&](int number) {
      if (number > 0) return help();
      run();
      ended_.store(true, std::memory_order_release);
    });
  }

  // A loop over [0, count), in chunks no shorter than `grain`: work(chunks) on each thread that
  // comes in time, which goes on until it gets no more chunks. Call it within `work`.
  template <class Work>
  void share(int64_t count, int64_t grain, const Work& work) {
    const int64_t finest = threads > 1 ? CHUNKS_PER_THREAD * threads : 1;
    const int64_t total = std::max<int64_t>(1, std::min(finest, count / grain));
    const uint64_t loop = (loop_.load(std::memory_order_relaxed) >> 32) + 1;
    call_.store(
        [](const void* work, Chunks& chunks) { (*(const Work*)work)(chunks); },
        std::memory_order_relaxed);
    work_.store(&work, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    next_.store(loop << 32, std::memory_order_release);
    loop_.store(loop << 32 | (uint64_t)total, std::memory_order_release);
    take(loop << 32 | (uint64_t)total);
    for (int turns = 0; done_.load(std::memory_order_acquire) < total; turns++) pause(turns);
  }

  // The same for loops that need nothing per thread: work(begin, end) for each chunk.
  template <class Work>
  void for_each(int64_t count, int64_t grain, const Work& work) {
    share(count, grain, [&](Chunks& chunks) {
      for (int64_t begin, end; chunks.next(begin, end);) work(begin, end);
    });
  }

 private:
  using Call = void (*)(const void*, Chunks&);
  static constexpr int64_t CHUNKS_PER_THREAD = 64;
  static constexpr uint64_t LOW = 0xffffffff;

  alignas(64) std::atomic<uint64_t> loop_{0};  // its number, and how many chunks it has
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<bool> ended_{false};
  alignas(64) std::atomic<uint64_t> next_{0};  // the loop's number, and its next chunk
  alignas(64) std::atomic<int64_t> done_{0};   // chunks; each thread adds its own at its end

  // A thread's share of a loop. `call_`, `work_` and `count_` were written before `loop_`, and are
  // written again only when all chunks are done: a thread that gets a chunk has read those of its
  // own loop.
  void take(uint64_t loop) {
    const Call call = call_.load(std::memory_order_relaxed);
    const void* work = work_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed);
    Chunks chunks(*this, loop >> 32, count, (int64_t)(loop & LOW));
    if (!chunks.claim()) return;
    call(work, chunks);
    done_.fetch_add(chunks.done_, std::memory_order_acq_rel);
  }

  void help() {
    uint64_t last = 0;
    for (int turns = 0; !ended_.load(std::memory_order_acquire); turns++) {
      const uint64_t loop = loop_.load(std::memory_order_acquire);
      if (loop != last) take(last = loop), turns = 0;
      else pause(turns);
    }
  }

  static void pause(int turns) {
    if (turns % 4096 == 4095) return std::this_thread::yield();  // others may need the core
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

using Chunks = ThreadPool::Chunks;

}  // namespace
