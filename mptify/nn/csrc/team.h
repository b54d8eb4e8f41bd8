// Threads for both libraries.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#endif

// work(part) for each of `parts` parts, a thread for each, and from call to call the same one, in whose caches the data may still be. By
// torch's OpenMP threads, if its library is in this process: threads of our own would wait for a core on which one of those still spins, for
// longer than the work takes.
template <class Work>
void in_team(int parts, const Work& work) {
  using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);
  using Number = int (*)();
#ifndef _WIN32
  static const Start start = (Start)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  static const Number number = (Number)dlsym(RTLD_DEFAULT, "omp_get_thread_num");
#else
  static const Start start = nullptr;
  static const Number number = nullptr;
#endif
  if (parts == 1) return work(0);
  struct Task {
    std::vector<std::atomic<bool>> begun;
    const Work& work;

    void run(int first) {  // a team may come with fewer threads than asked for: whoever is free takes what nobody has begun
      const int parts = (int)begun.size();
      for (int i = 0; i < parts; i++) {
        const int part = (first + i) % parts;
        if (!begun[part].exchange(true)) work(part);
      }
    }
    const std::thread::id caller = std::this_thread::get_id();  // who begins with the first part, whatever the others do
  } task{std::vector<std::atomic<bool>>((size_t)parts), work};
  const auto join = [](void* data) {
    Task& task = *(Task*)data;
    task.run(std::this_thread::get_id() == task.caller ? 0 : std::max(1, number()));
  };
  if (start && number) return start(join, &task, (unsigned)parts, 0);
  std::vector<std::thread> others;
  for (int part = 1; part < parts; part++) others.emplace_back([&task, part] { task.run(part); });
  task.run(0);
  for (std::thread& other : others) other.join();
}
