// Threads for both libraries: those of torch's OpenMP runtime, if it is in this process. Threads
// of our own would wait for a core on which one of torch's still spins, for longer than the work
// takes.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#endif

// The functions behind `#pragma omp parallel` and `omp_get_thread_num()`. We look them up by name,
// so that the libraries neither need nor bring along an OpenMP runtime: a second one would have
// threads of its own.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
  int (*thread_num)();

  // Null if no OpenMP runtime is in this process.
  static const OpenMp* get() {
    static const OpenMp found = {
        (decltype(parallel))find("GOMP_parallel"),
        (decltype(thread_num))find("omp_get_thread_num"),
    };
    return found.parallel && found.thread_num ? &found : nullptr;
  }

 private:
  static void* find(const char* name) {
#ifndef _WIN32
    return dlsym(RTLD_DEFAULT, name);
#else
    return nullptr;
#endif
  }
};

// work(chunk) for each of `chunks` chunks. Each has a thread, the same one from call to call, in
// whose caches the data may still be.
template <class Work>
void run_parallel(int chunks, const Work& work) {
  if (chunks == 1) return work(0);
  struct Task {
    std::vector<std::atomic<bool>> begun;
    const Work& work;
    const std::thread::id caller = std::this_thread::get_id();

    // OpenMP may start fewer threads than we asked for: whoever is free takes what is left.
    void run(int first) {
      const int chunks = (int)begun.size();
      for (int i = 0; i < chunks; i++) {
        const int chunk = (first + i) % chunks;
        if (!begun[chunk].exchange(true)) work(chunk);
      }
    }
  } task{std::vector<std::atomic<bool>>((size_t)chunks), work};
  if (const OpenMp* openmp = OpenMp::get()) {
    const auto run = [](void* data) {
      Task& task = *(Task*)data;
      const bool is_caller = std::this_thread::get_id() == task.caller;
      task.run(is_caller ? 0 : std::max(1, OpenMp::get()->thread_num()));
    };
    return openmp->parallel(run, &task, (unsigned)chunks, 0);
  }
  std::vector<std::thread> others;
  for (int chunk = 1; chunk < chunks; chunk++)
    others.emplace_back([&task, chunk] { task.run(chunk); });
  task.run(0);
  for (std::thread& other : others) other.join();
}
