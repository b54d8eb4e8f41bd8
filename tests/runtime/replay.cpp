// Runs programs that tapes.py wrote, with each buffer in memory of its own and just as large as it
// must be. So a sanitizer sees every access outside, and other processors can run programs that
// this one has built. No sanitizer sees what machine code reads and writes: with MPTIFY_GUARD, pages
// that nobody may touch begin where a buffer ends.

#include <cstdio>
#include <memory>

#include "../../mptify/runtime/csrc/packed.cpp"

static int64_t number() {
  int64_t value = 0;
  if (std::fread(&value, 8, 1, stdin) != 1) std::exit(3);
  return value;
}

#ifdef MPTIFY_GUARD
struct Pages {
  static constexpr size_t PAGE = 4096;
  uint8_t* start;
  size_t size;

  explicit Pages(size_t bytes) : size((bytes + PAGE - 1) / PAGE * PAGE + PAGE) {
    start = (uint8_t*)mmap(
        nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + size - PAGE, PAGE, PROT_NONE)) std::exit(5);
    std::memset(start, 255, size - PAGE);  // what was not written is no zero
  }
  Pages(Pages&& other) : start(other.start), size(other.size) { other.start = nullptr; }
  ~Pages() {
    if (start) munmap(start, size);
  }
  uint8_t* last(size_t bytes) { return start + size - PAGE - bytes; }
};
static std::vector<Pages> memory;

static uint8_t* buffer(int64_t size) {
  memory.emplace_back((size_t)size);
  return memory.back().last((size_t)size);
}
#else
static std::vector<std::unique_ptr<uint8_t[]>> memory;

static uint8_t* buffer(int64_t size) {
  memory.emplace_back(new uint8_t[(size_t)std::max<int64_t>(size, 1)]);
  return memory.back().get();
}
#endif

static uint8_t* bytes(int64_t size) {
  uint8_t* to = buffer(size);
  if (size && std::fread(to, 1, (size_t)size, stdin) != (size_t)size) std::exit(3);
  return to;
}

int main() {
  for (int64_t tape = number(); tape > 0; tape--) {
    const int64_t cpu = number(), threads = number(), images = number(), kernel = number();
    const int64_t count = number();
    if (cpu >= mptify_packed_cpus()) return 4;
    Step* steps = (Step*)bytes(count * (int64_t)sizeof(Step));
    std::vector<uint8_t*> buffers;
    std::vector<int64_t> strides, sizes;
    std::vector<size_t> outputs;
    for (int64_t left = number(); left > 0; left--) {
      const int64_t what = number(), size = number();  // 0: given, 1: workspace, 2: printed
      strides.push_back(number());
      sizes.push_back(size);
      if (what == 2) outputs.push_back(buffers.size());
      buffers.push_back(what ? buffer(size) : bytes(size));
    }
    void* code = nullptr;  // kernel: the number of the kernel to make machine code for, or -1
    if (kernel >= 0)
      code = mptify_packed_compile(steps, count, buffers.data(), (int)kernel, (int)cpu);
    mptify_packed_run(
        steps, count, buffers.data(), strides.data(), images, (int)cpu, (int)threads);
    mptify_packed_release(code);
    for (const size_t output : outputs) std::fwrite(buffers[output], 1, (size_t)sizes[output], stdout);
    memory.clear();
  }
}
