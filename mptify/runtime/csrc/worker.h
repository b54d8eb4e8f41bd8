// The threads that run a program. Every thread runs all steps, one after the other; the steps share
// their loops. This is OpenMP's `parallel` with `for schedule(guided)`: one parallel region per
// run, not one per step.
//
// We had work stealing of our own here, where each thread started with the same chunks in every
// step. `mptify bench inference resnet18 --threads 2 --no-nodes --rounds 15`, alternating: two
// threads were 1.80 times as fast as one with it (median of 5 runs), 1.78 times with OpenMP's
// guided schedule, and 1.73 times with its dynamic one (4 chunks per thread).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../../nn/csrc/parallel.h"

namespace {

// What OpenMP does for its threads, for threads of our own: if there is no OpenMP runtime.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  // The next chunk of [0, count): a thread's fair share of what is left.
  bool next(int64_t count, int64_t& begin, int64_t& end) {
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= count) return false;
      end = begin + (count - begin + threads_ - 1) / threads_;
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

  // Wait for all threads; the next loop starts at 0.
  void barrier() {
    const int64_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) {
      while (generation_.load(std::memory_order_acquire) == generation) std::this_thread::yield();
      return;
    }
    next_.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
  }

 private:
  const int threads_;
  std::atomic<int64_t> next_{0}, generation_{0};
  std::atomic<int> arrived_{0};
};

class Worker;

// The chunks of a loop over [0, count) that one thread gets.
class Chunks {
 public:
  Chunks(const Worker& worker, int64_t count, int64_t total)
      : worker_(worker), count_(count), total_(total) {}

  // The next range; false if none is left.
  bool next(int64_t& begin, int64_t& end);

 private:
  const Worker& worker_;
  const int64_t count_, total_;  // total_ chunks
  bool has_started_ = false;
};

// One of the threads that run a program.
class Worker {
 public:
  const int number, threads;

  Worker(int number, int threads, Team* team) : number(number), threads(threads), team_(team) {}

  // A loop over [0, count), whose chunks are no shorter than `grain`: work(chunks) on each thread,
  // which goes on until it gets no more chunks. All threads leave together.
  template <class Work>
  void share(int64_t count, int64_t grain, const Work& work) {
    const int64_t finest = threads > 1 ? CHUNKS_PER_THREAD * threads : 1;
    const int64_t total = std::max<int64_t>(1, std::min(finest, count / grain));
    if (total == 1) {
      return single([&] {
        Chunks chunks(*this, count, 1);
        work(chunks);
      });
    }
    Chunks chunks(*this, count, total);
    work(chunks);
    if (team_) team_->barrier();
    else OpenMp::get()->loop_end();
  }

  // The same for loops that need nothing per thread: work(begin, end) for each chunk.
  template <class Work>
  void for_each(int64_t count, int64_t grain, const Work& work) {
    share(count, grain, [&](Chunks& chunks) {
      for (int64_t begin, end; chunks.next(begin, end);) work(begin, end);
    });
  }

  // work() on one thread, while the others wait.
  template <class Work>
  void single(const Work& work) {
    if (number == 0) work();
    if (threads == 1) return;
    if (team_) team_->barrier();
    else OpenMp::get()->barrier();
  }

 private:
  friend class Chunks;

  static constexpr int64_t CHUNKS_PER_THREAD = 64;  // the guided schedule takes many at a time

  Team* const team_;  // null if the threads are OpenMP's
};

inline bool Chunks::next(int64_t& begin, int64_t& end) {
  long first = 0, last = 1;
  if (total_ == 1) {
    if (has_started_) return false;
  } else if (worker_.team_) {
    int64_t from, to;
    if (!worker_.team_->next(total_, from, to)) return false;
    first = (long)from, last = (long)to;
  } else if (has_started_ ? !OpenMp::get()->loop_next(&first, &last)
                          : !OpenMp::get()->loop_start(0, (long)total_, 1, 1, &first, &last)) {
    has_started_ = true;
    return false;
  }
  has_started_ = true;
  begin = count_ * first / total_, end = count_ * last / total_;
  return true;
}

// run(worker) on each of up to `threads` threads at once.
template <class Run>
void run_workers(int threads, const Run& run) {
  if (threads <= 1) {
    Worker worker(0, 1, nullptr);
    return run(worker);
  }
  if (const OpenMp* openmp = OpenMp::get()) {
    const auto start = [](void* data) {
      const OpenMp& openmp = *OpenMp::get();
      Worker worker(openmp.thread_num(), openmp.num_threads(), nullptr);
      (*(const Run*)data)(worker);
    };
    return openmp->parallel(start, (void*)&run, (unsigned)threads, 0);
  }
  Team team(threads);
  const auto start = [&](int number) {
    Worker worker(number, threads, &team);
    run(worker);
  };
  std::vector<std::thread> others;
  for (int number = 1; number < threads; number++) others.emplace_back(start, number);
  start(0);
  for (std::thread& other : others) other.join();
}

}  // namespace
