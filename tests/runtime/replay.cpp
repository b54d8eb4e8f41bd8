// Runs steps that were written down by tapes.py, with each array in memory of its own, just as large as it must be: so that a
// sanitizer sees what lies outside, and other processors can run what this one has planned.

#include <cstdio>
#include <memory>

#include "../../mptify/runtime/csrc/packed.cpp"

static int64_t number() {
  int64_t value = 0;
  if (std::fread(&value, 8, 1, stdin) != 1) std::exit(3);
  return value;
}

static std::vector<std::unique_ptr<uint8_t[]>> memory;

static uint8_t* room(int64_t size) {
  memory.emplace_back(new uint8_t[(size_t)std::max<int64_t>(size, 1)]);
  return memory.back().get();
}

static uint8_t* bytes(int64_t size) {
  uint8_t* to = room(size);
  if (size && std::fread(to, 1, (size_t)size, stdin) != (size_t)size) std::exit(3);
  return to;
}

int main() {
  for (int64_t tape = number(); tape > 0; tape--) {
    const int64_t which = number(), threads = number(), images = number(), count = number();
    if (which >= mptify_packed_cpus()) return 4;
    const Step* steps = (const Step*)bytes(count * (int64_t)sizeof(Step));
    std::vector<uint8_t*> arrays;
    std::vector<int64_t> strides, sizes;
    std::vector<size_t> outputs;
    for (int64_t left = number(); left > 0; left--) {
      const int64_t what = number(), size = number();  // 0: given, 1: room, 2: room that is printed
      strides.push_back(number());
      sizes.push_back(size);
      if (what == 2) outputs.push_back(arrays.size());
      arrays.push_back(what ? room(size) : bytes(size));
    }
    mptify_packed_run(steps, count, arrays.data(), strides.data(), images, (int)which, (int)threads);
    for (const size_t array : outputs) std::fwrite(arrays[array], 1, (size_t)sizes[array], stdout);
    memory.clear();
  }
}
