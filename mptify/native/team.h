// Threads for both libraries.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#endif

// work(part) for each of `parts` parts, a thread for each. By torch's OpenMP threads, if its library is in this process: threads of our own would
// wait for a core on which one of those still spins, for longer than the work takes.
template <class Work>
void in_team(int parts, const Work& work) {
  using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);
#ifndef _WIN32
  static const Start start = (Start)dlsym(RTLD_DEFAULT, "GOMP_parallel");
#else
  static const Start start = nullptr;
#endif
  struct Task {
    std::atomic<int> next{0};
    const Work* work;
    int parts;

    void run() {  // a team may come with fewer threads than asked for: whoever is free takes the next part
      for (int part; (part = next++) < parts;) (*work)(part);
    }
  } task;
  task.work = &work, task.parts = parts;
  if (parts > 1 && start) return start([](void* data) { ((Task*)data)->run(); }, &task, (unsigned)parts, 0);
  std::vector<std::thread> others;
  for (int part = 1; part < parts; part++) others.emplace_back([&] { task.run(); });
  task.run();
  for (std::thread& other : others) other.join();
}
